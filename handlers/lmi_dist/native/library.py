"""The library of native kernels for this CPU: finds it, loads it, and packs weights with it.

`lmi_kernels.h` describes its functions. Those that run a model are called in `model.py`, those that
sample in `sampling.py`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from handlers.lmi_dist.arrays import Array, dtype_name, is_float
from handlers.lmi_dist.gguf.block_rows import BlockRows, joined_by_type
from handlers.lmi_dist.gguf.blocks import ZERO4, ZERO8
from handlers.lmi_dist.native.pages import Arena
from handlers.lmi_dist.native.records import (
    ABI,
    DTYPE_NUMBERS,
    F32,
    ModelRecord,
    Panels,
    StepRecord,
    address_of,
)
from handlers.lmi_dist.native_variants import library_file, variant_here
from lmi.shared import machine
from lmi.shared.gguf_file import TENSOR_TYPES, TensorType

# The kernels know a type of GGUF by its number in files, and types that no file has by these.
TYPE_NUMBERS = {kind: number for number, kind in TENSOR_TYPES.items()} | {ZERO4: 1000, ZERO8: 1001}


class _Signature(NamedTuple):
    """The types of a function of the library."""

    function: str
    arguments: tuple[Any, ...]
    result: Any


_SIGNATURES = (
    _Signature("lmi_packed_bytes", (c_int32, c_int32, c_int32), c_int64),
    _Signature("lmi_pack", (c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int32), None),
    _Signature("lmi_block_format", (c_int32,), c_int32),
    _Signature("lmi_pack_blocks", (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32), None),
    _Signature("lmi_block_bytes", (c_int32, c_int32, c_int32, c_int32), c_int64),
    _Signature("lmi_scratch_bytes", (POINTER(ModelRecord), c_int32), c_int64),
    _Signature("lmi_run", (POINTER(ModelRecord), POINTER(StepRecord), c_int32), c_int32),
    _Signature("lmi_error", (), c_char_p),
)


class NotAvailable(Exception):
    """There is no library for this machine. The text says why."""


@functools.cache
def load() -> Library:
    """Return the library for this CPU. Raises NotAvailable."""
    kind = variant_here()
    if kind is None:
        raise NotAvailable("none are made for this system and CPU")

    # Tests set it: a build with sanitizers.
    path = os.environ.get("LMI_NATIVE_LIBRARY")
    return Library(Path(path) if path else library_file(kind), kind)


def num_threads() -> int:
    """Return the number of threads of a step: OMP_NUM_THREADS, or one for each usable core."""
    # OpenMP reads a list, with a number for each level of nested threads.
    outer_level = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if outer_level.isdecimal():
        return max(1, int(outer_level))

    return min(len(os.sched_getaffinity(0)), _quota_cores())


# The quotas are read once: each weight that is packed asks for the number of threads.
_quota_cores = functools.cache(machine.quota_cores)


class Library:
    """The functions of one shared library, for CPUs of one kind."""

    def __init__(self, path: Path, kind: str) -> None:
        """Load the library. Raises NotAvailable."""
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotAvailable(
                f"{path.name} cannot be loaded ({error}); scripts/build-native builds it"
            ) from error

        if functions.lmi_abi() != ABI:
            raise NotAvailable(
                f"{path.name} is of another version; scripts/build-native builds this one"
            )

        for signature in _SIGNATURES:
            function = getattr(functions, signature.function)
            function.argtypes = signature.arguments
            function.restype = signature.result

        self.functions = functions
        self.path = path
        self.kind = kind
        self._arena = Arena()

    def pack(self, weight: Array, format: int, arena: Arena | None = None) -> Panels:
        """Pack a weight (num_out, num_in) of float32, bfloat16 or float16 into an arena, by default
        that of the library.

        `format` is F32, BF16, INT8, or BITS4 if num_in is a multiple of 32. Raises ValueError for a
        weight that is no matrix of floats.
        """
        if not is_float(weight) or weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(
                f"a weight must be a matrix of floats, given {dtype_name(weight)} {weight.shape}"
            )

        num_out, num_in = weight.shape
        weight = np.ascontiguousarray(weight)
        num_bytes = self.functions.lmi_packed_bytes(num_out, num_in, format)
        memory = (arena or self._arena).take(num_bytes)
        self.functions.lmi_pack(
            address_of(weight),
            DTYPE_NUMBERS[weight.dtype],
            num_out,
            num_in,
            format,
            address_of(memory),
            num_threads(),
        )

        return _panels(num_out, num_in, format, memory)

    def format_of(self, kind: TensorType) -> int:
        """Return the format of packed weights that keeps the blocks of a GGUF type as they are."""
        format = int(self.functions.lmi_block_format(TYPE_NUMBERS[kind]))
        assert format >= 0, f"{kind.name} has no blocks"
        return format

    def pack_blocks(self, weights: Sequence[BlockRows]) -> Panels:
        """Pack a weight whose rows are in blocks, perhaps of several types, into the arena of the
        library.

        Rows of one type become a part of the packed weight, which keeps their blocks. A panel has
        one type: if another begins within it, the whole weight is packed in float32.
        """
        parts = joined_by_type(weights)
        width = int(self.functions.lmi_panel_width())
        if any(len(part) % width for part in parts[:-1]):
            floats = np.concatenate([part.floats() for part in parts])
            return self.pack(floats, F32)

        # Each part points to the parts behind it, so the last one is packed first.
        rest: Panels | None = None
        for part in reversed(parts):
            panels = self._pack_part(part)
            if rest is not None:
                panels.num_own = panels.num_out // width
                panels.num_out += rest.num_out
                panels.rest = ctypes.pointer(rest)

            rest = panels

        assert rest is not None, "a weight has rows"
        return rest

    def _pack_part(self, rows: BlockRows) -> Panels:
        """Pack rows in blocks of one type."""
        num_out, num_in = rows.shape
        format = self.format_of(rows.type)
        num_bytes = self.functions.lmi_packed_bytes(num_out, num_in, format)
        memory = self._arena.take(num_bytes)

        data = np.ascontiguousarray(rows.data)
        self.functions.lmi_pack_blocks(
            address_of(data),
            TYPE_NUMBERS[rows.type],
            num_out,
            num_in,
            address_of(memory),
            num_threads(),
        )

        return _panels(num_out, num_in, format, memory)

    def bytes_of(self, panels: Panels) -> int:
        """Return the bytes of a packed weight with all of its parts."""
        num_bytes = 0
        part: Panels | None = panels
        while part is not None:
            rest: Panels | None = None
            num_out = part.num_out
            if part.rest:
                rest = part.rest.contents
                num_out -= rest.num_out

            num_bytes += self.functions.lmi_packed_bytes(num_out, part.num_in, part.format)
            part = rest

        return num_bytes

    def block_bytes(
        self, num_layers: int, num_kv_heads: int, head_dim: int, kv_format: int = F32
    ) -> int:
        """Return the bytes of the keys and values of one block of tokens.

        `kv_format` is F32 or BF16.
        """
        return int(self.functions.lmi_block_bytes(num_layers, num_kv_heads, head_dim, kv_format))


def _panels(num_out: int, num_in: int, format: int, memory: Array) -> Panels:
    panels = Panels(num_out=num_out, num_in=num_in, format=format, data=address_of(memory))
    # This keeps the memory as long as the panels.
    panels.memory = memory
    return panels
