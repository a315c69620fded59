"""Libraries of the native kernels for tests: what scripts/build-native made, or a build in a
temporary folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path

import numpy as np

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.native import pages
from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native.records import BF16, F32
from handlers.lmi_dist.native_variants import ROUNDING_VARIANTS, variant_here

NATIVE = Path(__file__).parents[4] / "handlers" / "lmi_dist" / "native"
SOURCES = sorted([*NATIVE.glob("*.h"), *NATIVE.glob("*.cpp")])
# What a variant is compiled for, where its name does not say it.
INSTRUCTIONS = {
    "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "x86-64-v4-amx": (
        "-march=x86-64-v4",
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-int8",
        "-mamx-bf16",
    ),
    "aarch64": ("-march=armv8.2-a",),
}
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


@functools.cache
def library(kind: str) -> Library:
    """The library of a variant, of the sources as they are now."""
    library_path = os.environ.get("LMI_NATIVE_LIBRARY")
    return Library(Path(library_path) if library_path else _fresh(kind), kind)


def variants() -> list[str]:
    """Those that this CPU can run, the best first."""
    best = variant_here()
    assert best is not None, "this CPU has no native kernels"
    if platform.machine() != "x86_64" or "LMI_NATIVE_LIBRARY" in os.environ:
        return [best]

    levels = ["x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]
    return levels[levels.index(best) :]


def exact_variants() -> list[str]:
    """Those of them that do not round activations to bfloat16."""
    return [variant for variant in variants() if variant not in ROUNDING_VARIANTS]


def kv_format_of(variant: str, format: int) -> int:
    """The format of keys and values beside weights of a format."""
    return BF16 if format == BF16 and variant in ROUNDING_VARIANTS else F32


def from_malloc(num_bytes: int, pages: int = mmap.MADV_HUGEPAGE) -> Array:
    """Zeroed bytes of which a sanitizer knows where they end."""
    num_bytes = max(num_bytes, 1)
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p()
    if libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(64), ctypes.c_size_t(num_bytes)):
        raise MemoryError(f"the system has no {num_bytes} bytes")

    memory = (ctypes.c_ubyte * num_bytes).from_address(address.value or 0)
    weakref.finalize(memory, libc.free, address)
    array: Array = np.ctypeslib.as_array(memory)
    array[:] = 0
    return array


if "LMI_NATIVE_LIBRARY" in os.environ:
    pages.allocate = from_malloc


def _fresh(kind: str) -> Path:
    built = NATIVE / f"lmi_kernels-{kind}.so"
    if built.is_file() and built.stat().st_mtime > max(
        source.stat().st_mtime for source in SOURCES
    ):
        return built

    assert shutil.which("g++"), f"{built.name} is not there or is old: run scripts/build-native"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"lmi-kernels-{os.getuid()}-{digest}-{kind}.so")
    with path.with_suffix(".lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not path.is_file():
            instructions = INSTRUCTIONS.get(kind, (f"-march={kind}",))
            partial = path.with_suffix(".partial")
            subprocess.run(
                ["g++", *FLAGS, *instructions, "-o", partial, NATIVE / "lmi_kernels.cpp"],
                check=True,
            )
            partial.replace(path)

    return path
