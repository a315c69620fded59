"""What routers are told of the blocks of the cache."""

from __future__ import annotations

from typing import Any

from handlers.base.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored
from handlers.lmi_dist.block_hashes import digest_of
from handlers.lmi_dist.cache_events import CacheEvents
from handlers.lmi_dist.cached_blocks import Root
from handlers.lmi_dist.kv_cache import KvCache

TOKENS = list(range(1, 9))


class Published(list[Any]):
    """The events of each batch, in the place of a publisher."""

    def publish(self, events: list[Any]) -> None:
        self.append(events)


def cache_of(num_blocks: int, published: Published) -> tuple[KvCache, CacheEvents]:
    events = CacheEvents(published, {7: "french"}.get)  # type: ignore[arg-type]
    return KvCache(num_blocks, 2, 4, reuses_prefixes=True, events=events), events


def compute(cache: KvCache, root: Root, tokens: list[int]) -> None:
    """Compute a prompt as far as it is not cached, and end its request."""
    end = len(tokens)
    slot = cache.allocate(end, cache.find(root, tokens, end).blocks)
    cache.cover(slot, end)
    cache.store(slot, root, tokens, end)
    cache.free(slot)


def number(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def test_full_blocks_are_told_once_with_the_block_before_them() -> None:
    published = Published()
    cache, events = cache_of(8, published)
    first = digest_of(None, TOKENS[:4])
    second = digest_of(first, TOKENS[4:])
    third = digest_of(second, [11, 12, 13, 14])

    compute(cache, Root(None), [*TOKENS, 9])
    events.publish()
    compute(cache, Root(None), [*TOKENS, 9])
    events.publish()
    compute(cache, Root(None), [*TOKENS, 11, 12, 13, 14])
    events.publish()

    stored = BlockStored(
        [number(first), number(second)], None, TOKENS, 4, None, "GPU", None, None, 0
    )
    longer = BlockStored(
        [number(third)], number(second), [11, 12, 13, 14], 4, None, "GPU", None, None, 0
    )

    assert published == [[AllBlocksCleared(), stored], [longer]]


def test_a_block_that_leaves_the_cache_is_told_unless_it_was_never_full() -> None:
    published = Published()
    cache, events = cache_of(2, published)
    # A full block, and a half one
    compute(cache, Root(None), TOKENS[:6])
    events.publish()
    compute(cache, Root(None), [21, 22, 23, 24, 25, 26, 27, 28])
    events.publish()

    [_, [removed, stored]] = published
    assert removed == BlockRemoved([number(digest_of(None, TOKENS[:4]))], "GPU", 0)
    assert isinstance(stored, BlockStored) and stored.token_ids == [21, 22, 23, 24, 25, 26, 27, 28]


def test_salts_and_adapters_keep_equal_tokens_apart_and_are_named() -> None:
    published = Published()
    cache, events = cache_of(8, published)
    for root in (Root(None), Root("secret"), Root(None, 7)):
        compute(cache, root, TOKENS)

    events.publish()

    [[_, plain, salted, adapted]] = published
    hashes = [number for event in (plain, salted, adapted) for number in event.block_hashes]

    assert len(set(hashes)) == 6
    assert plain.extra_keys is None
    assert salted.extra_keys == [("secret",), None]
    assert (adapted.lora_id, adapted.lora_name, adapted.extra_keys) == (
        7,
        "french",
        [("french",), ("french",)],
    )
