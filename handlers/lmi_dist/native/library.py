"""The native kernels of this CPU: finds their library, packs weights for it, and runs steps of a
program.

`lmi_kernels.h` describes the library, which only this file and `sampling.py` call, by ctypes.
Memory comes from the system directly, and is taken when it is first written: weights and buffers in
huge pages where the system has them, blocks in small ones.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

from handlers.lmi_dist.about import library_file, variant_here
from handlers.lmi_dist.arrays import BFLOAT16, Array, dtype_name, is_float
from handlers.lmi_dist.operations import (
    Adapter,
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    Norm,
    Operation,
    Program,
    Shrink,
)
from handlers.lmi_dist.plan import Chunk
from lmi.shared import machine

TOKENS_PER_BLOCK = 64
# The formats of packed weights.
F32, BF16, INT8 = range(3)

_ABI = 4
_EMBED, _NORM, _LINEAR, _ATTEND, _GATHER, _CAP, _SHRINK = range(7)
_ACTIVATIONS = {"none": 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}
_DTYPES = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}
_OF_PROGRAM = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_length",
    "num_sites",
)


class Panels(Structure):
    """A weight (num_out, num_in) in the form that products read, F32, BF16 or INT8."""

    # The memory that `data` points to.
    memory: Array
    _fields_ = [
        ("num_out", c_int32),
        ("num_in", c_int32),
        ("format", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
    ]


class _Op(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("input", c_int32),
        ("output", c_int32),
        ("adds", c_int32),
        ("is_centred", c_int32),
        ("activation", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("num_pairs", c_int32),
        ("is_wanted", c_int32),
        ("table_dtype", c_int32),
        ("site", c_int32),
        ("low", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("weight", POINTER(Panels)),
        ("gate", POINTER(Panels)),
        ("bias", c_void_p),
        ("gate_bias", c_void_p),
        ("table", c_void_p),
        ("positions", c_void_p),
        ("norm", c_void_p),
        ("rotations", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
    ]


class _Site(Structure):
    _fields_ = [
        ("down", Panels),
        ("up", Panels),
        ("gate", Panels),
    ]


class _Buffer(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("width", c_int32),
        ("num_rows", c_int32),
        ("is_wanted", c_int32),
        ("reserved", c_int32),
    ]


class _Model(Structure):
    _fields_ = [
        ("ops", POINTER(_Op)),
        ("buffers", POINTER(_Buffer)),
        ("pool", c_void_p),
        ("scratch", c_void_p),
        ("pool_bytes", c_int64),
        ("scratch_bytes", c_int64),
        ("num_ops", c_int32),
        ("num_buffers", c_int32),
        ("num_blocks", c_int32),
        *((name, c_int32) for name in _OF_PROGRAM),
    ]


class _Step(Structure):
    _fields_ = [
        ("ids", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("blocks", c_void_p),
        ("wanted", c_void_p),
        ("users", c_void_p),
        ("adapters", POINTER(POINTER(_Site))),
        ("num_rows", c_int32),
        ("num_chunks", c_int32),
        ("num_blocks", c_int32),
        ("num_wanted", c_int32),
        ("num_adapters", c_int32),
        ("reserved", c_int32),
    ]


class NotAvailable(Exception):
    """There is no library for this machine. The text says why."""


@functools.cache
def load() -> Library:
    """The library for this CPU; raises NotAvailable."""
    kind = variant_here()
    if kind is None:
        raise NotAvailable("none are made for this system and CPU")

    # Tests set it: a build with sanitizers.
    path = os.environ.get("LMI_NATIVE_LIBRARY")
    return Library(Path(path) if path else library_file(kind), kind)


def num_threads() -> int:
    """The threads of a step: as many as the operator arranges for every library, or one for each
    core.
    """
    arranged = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if arranged.isdecimal():
        return max(1, int(arranged))

    return machine.num_usable_cores()


def map_memory(num_bytes: int, pages: int) -> mmap.mmap:
    """Zeroed bytes in pages of the size that is advised; raises MemoryError."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {num_bytes} bytes: {error}") from error

    try:
        memory.madvise(pages)
    except OSError:
        # This kernel has no huge pages.
        pass

    return memory


def allocate(num_bytes: int, pages: int = mmap.MADV_HUGEPAGE) -> Array:
    """Zeroed bytes, (num_bytes,), in pages of the size that is advised; raises MemoryError."""
    return np.frombuffer(map_memory(num_bytes, pages), np.uint8)


class Arena:
    """Memory for many arrays, one behind the other, so that small ones lie in huge pages too."""

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = allocate(0)
        self._num_taken = 0

    def take(self, num_bytes: int) -> Array:
        """Bytes, (num_bytes,), whose address is a multiple of 64; they live as long as
        the array.
        """
        if self._num_taken + num_bytes > self._chunk.size:
            self._chunk = allocate(max(num_bytes, self._chunk_bytes))
            self._num_taken = 0

        start = self._num_taken
        self._num_taken = -(-(start + num_bytes) // 64) * 64
        return self._chunk[start : start + num_bytes]


class Library:
    """The functions of one shared library."""

    def __init__(self, path: Path, kind: str) -> None:
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotAvailable(
                f"{path.name} cannot be loaded ({error}); scripts/build-native builds it"
            ) from error

        if functions.lmi_abi() != _ABI:
            raise NotAvailable(
                f"{path.name} is of another version; scripts/build-native builds this one"
            )

        functions.lmi_packed_bytes.argtypes = (c_int32,) * 3
        functions.lmi_packed_bytes.restype = c_int64
        functions.lmi_pack.argtypes = (c_void_p, *(c_int32,) * 4, c_void_p, c_int32)
        functions.lmi_pack.restype = None
        functions.lmi_block_bytes.argtypes = (c_int32,) * 3
        functions.lmi_block_bytes.restype = c_int64
        functions.lmi_scratch_bytes.argtypes = (POINTER(_Model), c_int32)
        functions.lmi_scratch_bytes.restype = c_int64
        functions.lmi_run.argtypes = (POINTER(_Model), POINTER(_Step), c_int32)
        functions.lmi_error.restype = c_char_p

        self.functions = functions
        self.kind = kind
        self._arena = Arena()

    def pack(self, weight: Array, format: int, arena: Arena | None = None) -> Panels:
        """Pack a weight (num_out, num_in), float32, bfloat16 or float16, into the arena of the
        model or another one.
        """
        if not is_float(weight) or weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(
                f"a weight must be a matrix of floats, given {dtype_name(weight)} {weight.shape}"
            )

        num_out, num_in = weight.shape
        weight = np.ascontiguousarray(weight)
        num_bytes = self.functions.lmi_packed_bytes(num_out, num_in, format)
        data = (arena or self._arena).take(num_bytes)
        dtype = _DTYPES[weight.dtype]
        self.functions.lmi_pack(
            _address(weight), dtype, num_out, num_in, format, _address(data), num_threads()
        )
        panels = Panels(num_out, num_in, format, 0, _address(data))
        panels.memory = data
        return panels

    def block_bytes(self, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of the keys and values of one block of tokens."""
        return int(self.functions.lmi_block_bytes(num_layers, num_kv_heads, head_dim))


class NativeModel:
    """A program with its pool of blocks. Not safe to call from two threads at once."""

    def __init__(
        self, library: Library, program: Program[Panels], num_blocks: int, num_threads: int
    ) -> None:
        self._functions = library.functions
        self._program = program
        self._num_threads = num_threads

        self.block_bytes = library.block_bytes(
            program.num_layers, program.num_kv_heads, program.head_dim
        )
        # Prompts write to memory that was never used. On a virtual machine that gives free huge
        # pages back to its host, the first write to a huge page takes up to six times as long as
        # that to small ones.
        self._pool_memory = map_memory(num_blocks * self.block_bytes, mmap.MADV_NOHUGEPAGE)
        self.pool = np.frombuffer(self._pool_memory, np.uint8)

        ops = [_op(operation) for operation in program.operations]
        # The array keeps the panels alive, as the program does the arrays.
        self._ops = (_Op * len(ops))(*ops)
        self._buffers = (_Buffer * len(program.widths))()
        # A buffer is (capacity, width).
        self._memory: list[Array] = []
        self._scratch = allocate(0)
        self._max_rows = 0
        self._max_wanted = 0
        # By number: the sites, and the adapter that keeps their memory.
        self._adapters: dict[int, tuple[ctypes.Array[_Site], Adapter[Panels]]] = {}
        self._model = _Model(
            ops=self._ops,
            buffers=self._buffers,
            pool=_address(self.pool),
            pool_bytes=self.pool.size,
            num_ops=len(ops),
            num_buffers=len(program.widths),
            num_blocks=num_blocks,
            **{name: getattr(program, name) for name in _OF_PROGRAM},
        )

        scratch_bytes = int(self._functions.lmi_scratch_bytes(self._model, 1))
        self._wanted_bytes = 4 * sum(program.widths[index] for index in program.wanted)
        self._row_bytes = 4 * sum(program.widths) - self._wanted_bytes + scratch_bytes
        self._reserve(1, 1)

    def run(self, chunks: Sequence[Chunk]) -> Array:
        """Logits (num_wanted, vocab_size), float32, in the order of the chunks; valid until the
        next call.
        """
        ids = list[int]()
        blocks = list[int]()
        rows_with_logits = list[int]()
        for chunk in chunks:
            ids += chunk.token_ids
            end = chunk.start + len(chunk.token_ids)
            blocks += chunk.table[: (end + TOKENS_PER_BLOCK - 1) // TOKENS_PER_BLOCK]
            if chunk.num_logits == 1:
                # Every decode without a draft is such a chunk.
                rows_with_logits.append(len(ids) - 1)
            else:
                rows_with_logits += range(len(ids) - chunk.num_logits, len(ids))

        starts = [chunk.start for chunk in chunks]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        self._reserve(len(ids), len(rows_with_logits))

        numbers: list[int] = []
        users: list[int] = []
        if self._program.num_sites:
            numbers = sorted({chunk.adapter for chunk in chunks} - {0})

        if numbers:
            users = [numbers.index(chunk.adapter) if chunk.adapter else -1 for chunk in chunks]

        adapters = [self._adapters[number][0] for number in numbers]
        self._step(ids, starts, lengths, blocks, rows_with_logits, users, adapters=adapters)
        return self.buffer(-1)[: len(rows_with_logits)]

    def _step(self, *columns: list[int], adapters: Sequence[ctypes.Array[_Site]] = ()) -> None:
        """Run a step of (ids, starts, lengths, blocks, wanted), and with adapters (users).

        Raises ValueError, with nothing done, if the model or the step breaks a rule.
        """
        try:
            arrays = [array("i", column) for column in columns]
        except OverflowError as error:
            raise ValueError(f"a number of the step does not fit in 32 bits: {error}") from error

        ids, _, lengths, blocks, rows_with_logits, *_ = arrays
        step = _Step(*[column.buffer_info()[0] for column in arrays])
        step.num_rows = len(ids)
        step.num_chunks = len(lengths)
        step.num_blocks = len(blocks)
        step.num_wanted = len(rows_with_logits)
        if adapters:
            sites = [ctypes.cast(adapter, POINTER(_Site)) for adapter in adapters]
            step.adapters = (POINTER(_Site) * len(sites))(*sites)
            step.num_adapters = len(sites)

        if self._functions.lmi_run(self._model, step, self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())

    def put_adapter(self, number: int, adapter: Adapter[Panels]) -> None:
        """Let chunks use an adapter by its number, which is not 0."""
        sites: list[_Site] = []
        for low in adapter:
            if low is None:
                sites.append(_Site(Panels(), Panels(), Panels()))
            else:
                sites.append(_Site(low.down, low.up or Panels(), low.gate or Panels()))

        self._adapters[number] = (_Site * self._program.num_sites)(*sites), adapter

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def copy(self, from_block: int, to_block: int) -> None:
        """Copy the keys and values of a whole block, on this thread: to wake others for it would
        take longer.
        """
        blocks = self.pool.reshape(-1, self.block_bytes)
        blocks[to_block] = blocks[from_block]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give the memory of blocks back to the system, but for the pages that they share with
        their neighbours.
        """
        for block in blocks:
            start = -(-(block * self.block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (block + 1) * self.block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._pool_memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def step_bytes(self, num_rows: int, num_logits: int) -> int:
        """The bytes that a step of so many rows writes, of which so many have logits."""
        return num_rows * self._row_bytes + num_logits * self._wanted_bytes

    def buffer(self, index: int) -> Array:
        """The rows of a buffer after a step, float32 (capacity, width)."""
        return self._memory[index]

    def _reserve(self, num_rows: int, num_wanted: int) -> None:
        """Make the buffers large enough for a step. Rows that no step has used take no memory.

        If memory runs out, smaller steps still run.
        """
        if num_rows <= self._max_rows and num_wanted <= self._max_wanted:
            return

        max_rows = max(_next_power_of_two(num_rows), self._max_rows)
        max_wanted = max(_next_power_of_two(num_wanted), self._max_wanted)
        widths = self._program.widths
        memory: list[Array] = []
        for index, width in enumerate(widths):
            num_rows = max_wanted if index in self._program.wanted else max_rows
            rows = allocate(4 * num_rows * width).view(np.float32)
            memory.append(rows.reshape(num_rows, width))

        for index, rows in enumerate(memory):
            num_rows, width = rows.shape
            is_wanted = index in self._program.wanted
            self._buffers[index] = _Buffer(_address(rows), width, num_rows, is_wanted, 0)

        self._memory = memory
        self._scratch = allocate(self._functions.lmi_scratch_bytes(self._model, max_rows))
        self._model.scratch = _address(self._scratch)
        self._model.scratch_bytes = self._scratch.size
        self._max_rows = max_rows
        self._max_wanted = max_wanted


def _next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _op(operation: Operation[Panels]) -> _Op:
    match operation:
        case Embed(output=output, table=table):
            dtype = _DTYPES[table.dtype]
            op = _Op(_EMBED, output=output, table_dtype=dtype, scale=operation.scale)
            op.table = _address(table)
            op.positions = _address(operation.positions)
        case Norm(input=input, output=output):
            op = _Op(_NORM, input, output, operation.adds, operation.is_centred, eps=operation.eps)
            op.norm = _address(operation.weight)
            op.bias = _address(operation.bias)
        case Linear(input=input, output=output, site=site):
            activation = _ACTIVATIONS[operation.activation]
            op = _Op(_LINEAR, input, output, operation.adds, activation=activation)
            # 0 is null, and so is a pointer that is not set.
            if site is not None:
                op.site = site + 1

            if operation.gate is not None:
                op.gate = ctypes.pointer(operation.gate)

            op.low = operation.low
            op.weight = ctypes.pointer(operation.weight)
            op.bias = _address(operation.bias)
            op.gate_bias = _address(operation.gate_bias)
        case Shrink(input=input, output=output, site=site):
            op = _Op(_SHRINK, input, output, site=site + 1)
        case Attend(input=input, output=output):
            op = _Op(_ATTEND, input, output, layer=operation.layer, window=operation.window or 0)
            op.eps = operation.norm_eps
            op.scale = operation.scale
            op.cap = operation.softcap or 0.0
            if operation.rotations is not None:
                op.num_pairs = operation.rotations.shape[2]

            op.is_wanted = operation.is_wanted
            op.rotations = _address(operation.rotations)
            op.query_norm = _address(operation.query_norm)
            op.key_norm = _address(operation.key_norm)
        case Gather(input=input, output=output):
            op = _Op(_GATHER, input, output)
        case Cap(buffer=buffer):
            op = _Op(_CAP, buffer, buffer, cap=operation.cap)

    return op


def _address(array: Array | None) -> int | None:
    """The address of an array that somebody keeps, or None for null."""
    return None if array is None else array.ctypes.data
