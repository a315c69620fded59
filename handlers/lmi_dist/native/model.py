"""A model that the native kernels run: a program, its buffers, and its pool of blocks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.native import pages
from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native.op_records import record_of
from handlers.lmi_dist.native.records import (
    F32,
    OF_PROGRAM,
    BufferRecord,
    ModelRecord,
    OpRecord,
    Panels,
    SiteRecord,
    SiteRecords,
    address_of,
)
from handlers.lmi_dist.native.step_lists import StepLists
from handlers.lmi_dist.operations import Adapter, Program
from handlers.lmi_dist.plan import Chunk


class _UsableAdapter(NamedTuple):
    """An adapter in the form of the kernels, and the one that keeps the memory of its weights."""

    sites: SiteRecords
    adapter: Adapter[Panels]


class NativeModel:
    """A program with its pool of blocks. Not safe to call from two threads at once."""

    def __init__(
        self,
        library: Library,
        program: Program[Panels],
        num_blocks: int,
        num_threads: int,
        kv_format: int = F32,
    ) -> None:
        """`kv_format` is that of keys and values: F32, or BF16 where the library multiplies it.

        Raises MemoryError if the system has no memory for the pool.
        """
        self._functions = library.functions
        self._program = program
        self._num_threads = num_threads

        self.block_bytes = library.block_bytes(
            program.num_layers, program.num_kv_heads, program.head_dim, kv_format
        )
        # Prompts write to memory that was never used. On a virtual machine that gives free huge
        # pages back to its host, the first write to a huge page takes up to six times as long as
        # that to small ones.
        self._pool_memory = pages.map_memory(num_blocks * self.block_bytes, mmap.MADV_NOHUGEPAGE)
        self.pool = np.frombuffer(self._pool_memory, np.uint8)

        ops = [record_of(operation) for operation in program.operations]
        # The array keeps the panels alive, as the program does the arrays.
        self._ops = (OpRecord * len(ops))(*ops)
        self._buffers = (BufferRecord * len(program.widths))()
        self._adapters: dict[int, _UsableAdapter] = {}
        self._model = ModelRecord(
            ops=self._ops,
            buffers=self._buffers,
            pool=address_of(self.pool),
            pool_bytes=self.pool.size,
            num_ops=len(ops),
            num_buffers=len(program.widths),
            num_blocks=num_blocks,
            kv_format=kv_format,
            **{name: getattr(program, name) for name in OF_PROGRAM},
        )

        scratch_bytes = int(self._functions.lmi_scratch_bytes(self._model, 1))
        self._wanted_bytes = 4 * sum(program.widths[index] for index in program.wanted)
        self._row_bytes = 4 * sum(program.widths) - self._wanted_bytes + scratch_bytes

        # Each buffer is (capacity, width), float32. The last one has the logits.
        self._memory: list[Array] = []
        self._scratch = pages.allocate(0)
        self.release_activations()

    def run(self, chunks: Sequence[Chunk]) -> Array:
        """Return logits (num_wanted, vocab_size), float32, in the order of the chunks; valid until
        the next call.

        Raises ValueError, with nothing done, if a chunk breaks a rule, and KeyError for an adapter
        that was not put.
        """
        step = StepLists.of(chunks)
        num_wanted = len(step.wanted)
        self._reserve(len(step.ids), num_wanted)
        if self._program.num_sites:
            self._add_adapters(step, chunks)

        self._run_step(step)
        logits = self._memory[-1]
        return logits[:num_wanted]

    def _add_adapters(self, step: StepLists, chunks: Sequence[Chunk]) -> None:
        """Add the adapters of a step's chunks, and who uses them. Without any they stay empty."""
        numbers = sorted({chunk.adapter for chunk in chunks} - {0})
        if not numbers:
            return

        step.adapters = [self._adapters[number].sites for number in numbers]
        step.users = [numbers.index(chunk.adapter) if chunk.adapter else -1 for chunk in chunks]

    def _run_step(self, step: StepLists) -> None:
        """Run a step.

        Raises ValueError, with nothing done, if the model or the step breaks a rule.
        """
        packed = step.packed()
        if self._functions.lmi_run(self._model, packed.record, self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())

    def put_adapter(self, number: int, adapter: Adapter[Panels]) -> None:
        """Let chunks use an adapter by its number, which is not 0."""
        sites: list[SiteRecord] = []
        for low in adapter:
            if low is None:
                sites.append(SiteRecord())
            else:
                sites.append(SiteRecord(low.down, low.up or Panels(), low.gate or Panels()))

        records = (SiteRecord * self._program.num_sites)(*sites)
        self._adapters[number] = _UsableAdapter(records, adapter)

    def adapter(self, number: int) -> Adapter[Panels]:
        """Return an adapter that was put. Raises KeyError."""
        return self._adapters[number].adapter

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if there is one of this number."""
        self._adapters.pop(number, None)

    def block(self, number: int) -> Array:
        """Return the keys and values of a block as bytes, (block_bytes,), not copied."""
        return self.pool[number * self.block_bytes : (number + 1) * self.block_bytes]

    def copy(self, from_block: int, to_block: int) -> None:
        """Copy the keys and values of a whole block, on this thread: to wake others for it would
        take longer.
        """
        self.block(to_block)[:] = self.block(from_block)

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
        """Return the bytes that a step of so many rows writes, of which so many have logits."""
        return num_rows * self._row_bytes + num_logits * self._wanted_bytes

    def release_activations(self) -> None:
        """Give the memory of the buffers back. The next step takes what it needs."""
        self._max_rows = 0
        self._max_wanted = 0
        self._reserve(1, 1)

    def buffer(self, index: int) -> Array:
        """Return the rows of a buffer after a step, float32 (capacity, width)."""
        return self._memory[index]

    def _reserve(self, num_rows: int, num_wanted: int) -> None:
        """Make the buffers large enough for a step. Rows that no step has used take no memory.

        If memory runs out, smaller steps still run.
        """
        if num_rows <= self._max_rows and num_wanted <= self._max_wanted:
            return

        max_rows = max(_next_power_of_two(num_rows), self._max_rows)
        max_wanted = max(_next_power_of_two(num_wanted), self._max_wanted)
        memory: list[Array] = []
        for index, width in enumerate(self._program.widths):
            capacity = max_wanted if index in self._program.wanted else max_rows
            numbers = pages.allocate(4 * capacity * width).view(np.float32)
            memory.append(numbers.reshape(capacity, width))

        for index, buffer in enumerate(memory):
            capacity, width = buffer.shape
            self._buffers[index] = BufferRecord(
                data=address_of(buffer),
                width=width,
                num_rows=capacity,
                is_wanted=index in self._program.wanted,
            )

        self._memory = memory
        self._scratch = pages.allocate(self._functions.lmi_scratch_bytes(self._model, max_rows))
        self._model.scratch = address_of(self._scratch)
        self._model.scratch_bytes = self._scratch.size
        self._max_rows = max_rows
        self._max_wanted = max_wanted


def _next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
