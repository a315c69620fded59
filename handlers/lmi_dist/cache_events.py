"""What the tree of cached blocks gains and loses, told to routers: events of vLLM with its hashes
of blocks.

A hash is made as vLLM's `sha256_cbor` makes it, of the block before, the tokens, and what else
keeps requests apart. It is shown as a number of 64 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from handlers.base.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    of_replica,
    replica_here,
)
from handlers.lmi_dist.cached_blocks import Root, Tokens
from lmi.settings.annexes import KvEventsConfig

# This stands in the place of the block before the first one.
SEED = "vllm-none-hash"
# vLLM's word for the memory in which the engine computes, on a CPU too.
MEDIUM = "GPU"
# The kinds of values in CBOR.
ARRAY = 4
BYTES = 2
TEXT = 3
NUMBER = 0
NOTHING = b"\xf6"

# What keeps requests apart: each has a name of what it is, then values.
Extra = tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class _Block:
    """A full block of the tree."""

    digest: bytes
    number: int


class CacheEvents:
    """Collects events and publishes those of a step together."""

    def __init__(
        self, publisher: EventPublisher, name_of: Callable[[int], str | None] = lambda adapter: None
    ) -> None:
        """`name_of` returns the name of an adapter by its number."""
        self._publisher = publisher
        self._name_of = name_of
        # By block.
        self._blocks: dict[int, _Block] = {}
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        # Whether something was published.
        self._has_begun = False

    def store(self, root: Root, parent: int | None, tokens: Tokens, block: int) -> None:
        """Note that the tree has a full block below its parent, or as the first one."""
        name = self._name_of(root.adapter) if root.adapter else None
        extra = extra_of(root, name, is_first=parent is None)
        values = tuple([pair[1] for pair in extra]) or None
        digest_before: bytes | None = None
        number_before: int | None = None
        if parent is not None:
            digest_before = self._blocks[parent].digest
            number_before = self._blocks[parent].number

        digest = digest_of(digest_before, tokens, extra)
        number = int.from_bytes(digest[-8:], "big")
        self._blocks[block] = _Block(digest, number)

        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == number_before:
            last.block_hashes.append(number)
            last.token_ids += tokens
            if last.extra_keys is not None:
                last.extra_keys.append(values)

            return

        event = BlockStored(
            block_hashes=[number],
            parent_block_hash=number_before,
            token_ids=list(tokens),
            block_size=len(tokens),
            lora_id=root.adapter or None,
            medium=MEDIUM,
            lora_name=name,
            extra_keys=None if values is None else [values],
            group_idx=0,
        )
        self._events.append(event)

    def remove(self, block: int) -> None:
        """Note that the tree has forgotten a block. Nothing is told of one that was never full."""
        removed = self._blocks.pop(block, None)
        if removed is None:
            return

        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(removed.number)
        else:
            self._events.append(BlockRemoved([removed.number], MEDIUM, 0))

    def publish(self) -> None:
        """Publish what has changed.

        The first batch also says that what an engine before this one had is gone.
        """
        if not self._events:
            return

        events = self._events
        self._events = []
        if not self._has_begun:
            events.insert(0, AllBlocksCleared())
            self._has_begun = True

        self._publisher.publish(events)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()


def new_events(
    config: KvEventsConfig, num_replicas: int, name_of: Callable[[int], str | None]
) -> CacheEvents:
    """Return what tells routers of the cache of this replica. Raises BadConfiguration."""
    replica = replica_here()
    publisher = EventPublisher(of_replica(config, replica, num_replicas), replica)
    return CacheEvents(publisher, name_of)


# The hash of a block.


def extra_of(root: Root, adapter: str | None, *, is_first: bool) -> Extra:
    """Return what keeps the blocks below a root apart from those with the same tokens.

    A salt is part of the first.
    """
    extra: list[tuple[str, ...]] = []
    if root.adapter:
        extra.append(("lora", adapter or "", str(root.adapter)))

    if is_first and root.cache_salt is not None:
        extra.append(("cache_salt", root.cache_salt))

    return tuple(extra)


def digest_of(before: bytes | None, tokens: Sequence[int], extra: Extra = ()) -> bytes:
    """Return the hash of a block: SHA-256 of the CBOR of the hash before it, its tokens, and what
    is `extra`.
    """
    parts = [
        _head(ARRAY, 3),
        _bytes(before or FIRST),
        _array([_head(NUMBER, token) for token in tokens]),
    ]
    if extra:
        parts.append(_array([_array(list(map(_text, values))) for values in extra]))
    else:
        parts.append(NOTHING)

    return sha256(b"".join(parts)).digest()


def _array(items: list[bytes]) -> bytes:
    return _head(ARRAY, len(items)) + b"".join(items)


def _bytes(value: bytes) -> bytes:
    return _head(BYTES, len(value)) + value


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")
    return _head(TEXT, len(data)) + data


def _head(kind: int, number: int) -> bytes:
    """Return a number of CBOR in its shortest form, with the kind of what it counts."""
    if number < 24:
        return bytes((kind << 5 | number,))

    if number < 1 << 8:
        return bytes((kind << 5 | 24, number))

    if number < 1 << 16:
        return bytes((kind << 5 | 25,)) + number.to_bytes(2, "big")

    if number < 1 << 32:
        return bytes((kind << 5 | 26,)) + number.to_bytes(4, "big")

    return bytes((kind << 5 | 27,)) + number.to_bytes(8, "big")


FIRST = sha256(_text(SEED)).digest()
