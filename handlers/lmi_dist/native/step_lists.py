"""The chunks of a step as the kernels read them: lists of numbers, at addresses."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER
from typing import NamedTuple, Self

from msgspec import Struct, field

from handlers.lmi_dist.native.records import (
    TOKENS_PER_BLOCK,
    SiteRecord,
    SiteRecords,
    StepRecord,
)
from handlers.lmi_dist.plan import Chunk

# The lists whose addresses a StepRecord has under the same names.
LISTS = ("ids", "starts", "lengths", "blocks", "wanted", "users")


class PackedStep(NamedTuple):
    """A step for the kernels, and the memory to which it points."""

    record: StepRecord
    arrays: list[array[int]]


class StepLists(Struct):
    """What the chunks of a step have, one after the other."""

    # The tokens of all chunks, in order.
    ids: list[int]
    # (num_chunks): the position of a chunk's first token.
    starts: list[int]
    # (num_chunks): how many tokens a chunk has.
    lengths: list[int]
    # The blocks of all chunks, in order, each chunk's up to its last token.
    blocks: list[int]
    # The rows, counted over all tokens, that have logits; ascending.
    wanted: list[int]
    # (num_chunks): the index of each chunk's adapter in `adapters`, -1 for none. It is empty if no
    # chunk has one.
    users: list[int] = field(default_factory=list)
    adapters: list[SiteRecords] = field(default_factory=list)

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Self:
        """Return the lists of these chunks, without their adapters."""
        ids = list[int]()
        blocks = list[int]()
        wanted = list[int]()
        for chunk in chunks:
            ids += chunk.token_ids
            end = chunk.start + len(chunk.token_ids)
            blocks += chunk.table[: (end + TOKENS_PER_BLOCK - 1) // TOKENS_PER_BLOCK]
            if chunk.num_logits == 1:
                # Every decode without a draft is such a chunk.
                wanted.append(len(ids) - 1)
            else:
                wanted += range(len(ids) - chunk.num_logits, len(ids))

        starts = [chunk.start for chunk in chunks]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        return cls(ids, starts, lengths, blocks, wanted)

    def packed(self) -> PackedStep:
        """Return the step for the kernels. Raises ValueError for a number over 32 bits."""
        arrays: list[array[int]] = []
        addresses: dict[str, int] = {}
        for name in LISTS:
            try:
                numbers = array("i", getattr(self, name))
            except OverflowError as error:
                raise ValueError(
                    f"a number of the step does not fit in 32 bits: {error}"
                ) from error

            arrays.append(numbers)
            addresses[name], _ = numbers.buffer_info()

        record = StepRecord(
            **addresses,
            num_rows=len(self.ids),
            num_chunks=len(self.lengths),
            num_blocks=len(self.blocks),
            num_wanted=len(self.wanted),
        )
        if self.adapters:
            sites = [ctypes.cast(adapter, POINTER(SiteRecord)) for adapter in self.adapters]
            record.adapters = (POINTER(SiteRecord) * len(sites))(*sites)
            record.num_adapters = len(sites)

        return PackedStep(record, arrays)
