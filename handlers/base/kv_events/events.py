"""The messages: their names and the order of their fields are vLLM's."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class CacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """A change of the cache."""


class BlockStored(CacheEvent):
    """Blocks that follow each other, with all their tokens. `parent_block_hash` is the block before
    them, if any.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    # Tokens of a block.
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # What else the hash of each block is made of.
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(CacheEvent):
    """Blocks that are not in the cache any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(CacheEvent):
    """What was told before is gone."""


Change: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEventBatch(msgspec.Struct, array_like=True):
    """The changes of a step."""

    # Seconds since the epoch.
    ts: float
    events: Sequence[Change]
    # The number of the replica.
    data_parallel_rank: int
