"""A model that the native kernels run: its program, the buffers of its operations, and the pool of
its KV cache's blocks.
"""

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


class _AdapterWithRecords(NamedTuple):
    """An adapter, and its records in the form of the kernels, which point to its weights."""

    adapter: Adapter[Panels]
    sites: SiteRecords


class NativeModel:
    """Runs the steps of a program, with the keys and values of all sequences in its pool of blocks.

    It is not safe to call from two threads at once.
    """

    def __init__(
        self,
        library: Library,
        program: Program[Panels],
        num_blocks: int,
        num_threads: int,
        kv_format: int = F32,
    ) -> None:
        """`kv_format` is the format of keys and values: F32, or BF16 if the CPU multiplies it.

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
        # The records point to packed weights, which `_program` keeps.
        self._ops = (OpRecord * len(ops))(*ops)
        self._buffers = (BufferRecord * len(program.widths))()
        self._adapters: dict[int, _AdapterWithRecords] = {}
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
        """Compute a step. Return its logits, float32 (num_wanted, vocab_size), in the order of the
        chunks. They are valid until the next call.

        Raises ValueError, with nothing computed, if a chunk breaks a rule, and KeyError for an
        adapter that was not put.
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
        """Add to a step the adapters of its chunks, and which chunk uses which.

        If no chunk has one, both lists stay empty.
        """
        numbers = sorted({chunk.adapter for chunk in chunks} - {0})
        if not numbers:
            return

        step.adapters = [self._adapters[number].sites for number in numbers]
        for chunk in chunks:
            step.users.append(numbers.index(chunk.adapter) if chunk.adapter else -1)

    def _run_step(self, step: StepLists) -> None:
        """Call the kernels for a step.

        Raises ValueError, with nothing computed, if the model or the step breaks a rule.
        """
        packed = step.packed()
        if self._functions.lmi_run(self._model, packed.record, self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())

    def put_adapter(self, number: int, adapter: Adapter[Panels]) -> None:
        """Add an adapter, which chunks then name by its number. 0 is none."""
        sites: list[SiteRecord] = []
        for low_rank in adapter:
            if low_rank is None:
                sites.append(SiteRecord())
                continue

            up = low_rank.up or Panels()
            gate = low_rank.gate or Panels()
            sites.append(SiteRecord(low_rank.down, up, gate))

        records = (SiteRecord * self._program.num_sites)(*sites)
        self._adapters[number] = _AdapterWithRecords(adapter, records)

    def adapter(self, number: int) -> Adapter[Panels]:
        """Return an adapter that was put. Raises KeyError."""
        return self._adapters[number].adapter

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if there is one of this number."""
        self._adapters.pop(number, None)

    def block(self, number: int) -> Array:
        """Return the keys and values of a block as bytes, (block_bytes,), not copied."""
        start = number * self.block_bytes
        return self.pool[start : start + self.block_bytes]

    def copy(self, from_block: int, to_block: int) -> None:
        """Copy the keys and values of a whole block.

        This thread copies alone, because to wake others would take longer.
        """
        self.block(to_block)[:] = self.block(from_block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give the memory of blocks back to the system, but for the pages that they share with
        their neighbours.
        """
        page_bytes = mmap.PAGESIZE
        for block in blocks:
            # The first page that begins in the block, and the end of the last one that ends in it.
            start = -(-(block * self.block_bytes) // page_bytes) * page_bytes
            end = (block + 1) * self.block_bytes // page_bytes * page_bytes
            if end > start:
                self._pool_memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def step_bytes(self, num_rows: int, num_logits: int) -> int:
        """Return the bytes that a step of `num_rows` tokens writes, `num_logits` of them with
        logits.
        """
        return num_rows * self._row_bytes + num_logits * self._wanted_bytes

    def release_activations(self) -> None:
        """Give the memory of the buffers back to the system. The next step takes what it needs."""
        self._max_rows = 0
        self._max_wanted = 0
        self._reserve(1, 1)

    def buffer(self, index: int) -> Array:
        """Return the rows that a step has left in a buffer, float32 (capacity, width)."""
        return self._memory[index]

    def _reserve(self, num_rows: int, num_wanted: int) -> None:
        """Make the buffers large enough for a step. Rows that no step has used take no memory.

        Raises MemoryError, and keeps the buffers, with which smaller steps still run.
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
