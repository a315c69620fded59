"""vLLM's events of the KV cache, which are sent in msgpack. Names and the order of fields are
vLLM's.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    """A change of the cache."""


class BlockStored(_Event):
    """Blocks that follow each other, with all their tokens. `parent_block_hash` is the block before
    them, if any.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    # Tokens of a block.
    block_size: int
    # The number and the name of the adapter. None: the blocks are of the model without one.
    lora_id: int | None
    # Where the blocks lie, as "GPU" or "CPU". None: not told.
    medium: str | None
    lora_name: str | None
    # What else the hash of each block is made of.
    extra_keys: list[tuple[str, ...] | None] | None = None
    # The group of layers that share blocks. None: not told.
    group_idx: int | None = None


class BlockRemoved(_Event):
    """Blocks that are not in the cache any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """What was told before is gone."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEventBatch(msgspec.Struct, array_like=True):
    """The events of a step."""

    # Seconds since the epoch.
    ts: float
    events: Sequence[CacheEvent]
    # The number of the replica.
    data_parallel_rank: int
