"""The variants of the native library: those that are built, and the one that a CPU takes.

This module imports none of the engine's libraries.
"""

import functools
import platform
from pathlib import Path

LIBRARIES = Path(__file__).parent / "native"
PREFIX = "lmi_kernels-"
SUFFIX = ".so"
# Features of CPUs, as /proc/cpuinfo names them.
X86_64_V3 = frozenset(
    {
        "abm",
        "avx2",
        "bmi1",
        "bmi2",
        "f16c",
        "fma",
        "movbe",
    }
)
X86_64_V4 = X86_64_V3 | {
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512f",
    "avx512vl",
}
X86_64_V4_BF16 = X86_64_V4 | {"avx512_bf16"}
X86_64_V4_AMX = X86_64_V4_BF16 | {
    "amx_bf16",
    "amx_int8",
    "amx_tile",
    "avx512_vnni",
}
# Those that multiply weights in bfloat16 by activations that are rounded to bfloat16.
ROUNDING_VARIANTS = frozenset({"x86-64-v4-amx", "x86-64-v4-bf16"})
# Linux gives a process the registers of AMX when it asks: arch_prctl, by its number, with a request
# and the number of the registers' state.
ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


def library_file(variant: str, folder: Path = LIBRARIES) -> Path:
    """Return where the library of a variant lies, if it was built."""
    return folder / f"{PREFIX}{variant}{SUFFIX}"


def built_variants(folder: Path = LIBRARIES) -> list[str]:
    """Return the names of the variants that were built, sorted."""
    names = (file.name for file in folder.glob(f"{PREFIX}*{SUFFIX}"))
    return sorted(name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in names)


def variant_here() -> str | None:
    """The variant that this CPU takes, or None where there is none for it.

    Where that is the one with AMX, the process may use AMX from then on.
    """
    if platform.system() != "Linux":
        return None

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []

    # The first such line is that of the first core.
    flags = ""
    for line in lines:
        if line.startswith("flags"):
            flags = line.partition(":")[2]
            break

    features = frozenset(flags.split())
    if "amx_tile" in features and not _may_use_amx():
        features -= {"amx_tile"}

    return variant_of(platform.machine(), features)


@functools.cache
def _may_use_amx() -> bool:
    """Ask Linux for the registers of AMX. A sandbox may refuse them."""
    # Most processes have no other use for it.
    import ctypes

    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def variant_of(machine: str, flags: frozenset[str]) -> str | None:
    """The variant for a machine, as `uname -m` names it, with these features."""
    if machine == "aarch64":
        return "aarch64"

    if machine != "x86_64":
        return None

    if flags >= X86_64_V4_AMX:
        return "x86-64-v4-amx"

    if flags >= X86_64_V4_BF16:
        return "x86-64-v4-bf16"

    if flags >= X86_64_V4:
        return "x86-64-v4"

    if flags >= X86_64_V3:
        return "x86-64-v3"

    return None


def describe_kernels(folder: Path = LIBRARIES, variant: str | None = None) -> str:
    """What computes on this CPU, or on one that takes `variant`, and which variants are built."""
    variant = variant or variant_here()
    names = built_variants(folder)
    built = f"built: {', '.join(names) or 'none'}"
    if variant is None:
        return f"kernels torch ({built}; none is for this CPU)"

    if variant not in names:
        return f"kernels torch ({built}; this CPU: {variant})"

    return f"kernels native {variant} ({built})"
