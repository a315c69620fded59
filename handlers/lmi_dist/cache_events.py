"""What the tree of cached blocks gains and loses, told to routers in events of vLLM.

A block goes by its hash, which is shown as a number of 64 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from handlers.base.kv_events.endpoints import of_replica, replica_here
from handlers.base.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from handlers.base.kv_events.publisher import EventPublisher
from handlers.lmi_dist.block_hashes import digest_of, extra_of
from handlers.lmi_dist.cached_blocks import Root, Tokens
from lmi.settings.annexes import KvEventsConfig

# vLLM's word for the memory in which the engine computes, on a CPU too.
MEDIUM = "GPU"


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
        self._events: list[CacheEvent] = []
        # Whether something was published.
        self._has_begun = False

    def store(self, root: Root, parent: int | None, tokens: Tokens, block: int) -> None:
        """Note that the tree has a full block below its parent, or as the first one."""
        name = self._name_of(root.adapter) if root.adapter else None
        extra = extra_of(root, name, is_first=parent is None)
        block_before = None if parent is None else self._blocks[parent]
        digest_before = None if block_before is None else block_before.digest
        digest = digest_of(digest_before, tokens, extra)
        number = int.from_bytes(digest[-8:], "big")
        self._blocks[block] = _Block(digest, number)

        # vLLM tells the value behind each name.
        extra_keys = tuple([values[1] for values in extra]) or None
        event = BlockStored(
            block_hashes=[number],
            parent_block_hash=None if block_before is None else block_before.number,
            token_ids=list(tokens),
            block_size=len(tokens),
            lora_id=root.adapter or None,
            medium=MEDIUM,
            lora_name=name,
            extra_keys=None if extra_keys is None else [extra_keys],
            group_idx=0,
        )
        self._note_stored(event)

    def _note_stored(self, event: BlockStored) -> None:
        """Add an event of one block, to the event before it if that ends with the block's
        parent.
        """
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockStored) or last.block_hashes[-1] != event.parent_block_hash:
            self._events.append(event)
            return

        last.block_hashes += event.block_hashes
        last.token_ids += event.token_ids
        if last.extra_keys is not None:
            last.extra_keys += event.extra_keys or [None]

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
