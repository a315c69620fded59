"""Events of the caches of both engines, read by vLLM's own classes, as its subscribers and routers
do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handlers.lmi_dist import Executor as EmbeddedExecutor
from lmi.executor import Executor
from lmi.settings.annexes import KvEventsConfig
from lmi.settings.config import EngineConfig
from lmi.shared.linux import REPLICA
from tests.fake_runner import SharingRunner
from tests.handlers.vllm.asking import ask, finals, start

pytestmark = pytest.mark.vllm
TIMEOUT_MS = 60_000


def events_in(folder: Path) -> KvEventsConfig:
    return KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
    )


def embedded(events: KvEventsConfig) -> Executor:
    return EmbeddedExecutor(
        SharingRunner(), EngineConfig(max_kv_cache_tokens=512, kv_events_config=events)
    )


def vllm(events: KvEventsConfig) -> Executor:
    return start(kv_events_config=events)


def replayed(endpoint: str, first: int) -> list[tuple[int, Any]]:
    """Ask for the batches from a number on."""
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    batches = []
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        while asking.poll(TIMEOUT_MS):
            _, _, number, payload = asking.recv_multipart()
            if not payload:
                return batches

            batches.append((int.from_bytes(number, "big"), decode(payload)))

    raise AssertionError("the engine sends no end")


@pytest.mark.parametrize("make", [embedded, vllm])
def test_a_subscriber_of_vllm_follows_the_cache(
    make: Callable[[KvEventsConfig], Executor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zmq
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    monkeypatch.setenv(REPLICA, "1")
    with make(events_in(tmp_path)) as engine, zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.connect(f"ipc://{tmp_path}/events_dp1")
        subscriber.subscribe(b"")
        prompts: list[tuple[int, ...]] = []
        # Later ones evict blocks
        while len(prompts) < 3 or not subscriber.poll(100):
            prompts.append(tuple((len(prompts) + place) % 40 for place in range(300)))
            finals(
                engine,
                [engine.enqueue_request(ask(input_token_ids=prompts[-1][:96], max_tokens=1))],
            )
            finals(engine, [engine.enqueue_request(ask(input_token_ids=prompts[-1], max_tokens=1))])

        _, number, payload = subscriber.recv_multipart()
        event_number = int.from_bytes(number, "big")
        event_batch = msgspec.msgpack.Decoder(KVEventBatch).decode(payload)
        batches = replayed(f"ipc://{tmp_path}/replay_dp1", 0)

    assert [number for number, _ in batches] == list(range(len(batches)))
    assert batches[event_number][1] == event_batch and event_batch.data_parallel_rank == 1

    events = [event for _, batch in batches for event in batch.events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert any(isinstance(event, BlockRemoved) for event in events)

    for event in stored:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size

    # What was stored of the first prompt is a chain of its blocks.
    prefix_tokens: dict[Any, tuple[int, ...]] = {None: ()}
    for event in stored:
        tokens = prefix_tokens[event.parent_block_hash]
        for place, block in enumerate(event.block_hashes):
            tokens += tuple(
                event.token_ids[place * event.block_size : (place + 1) * event.block_size]
            )
            prefix_tokens[block] = tokens

    size = stored[0].block_size
    assert prompts[0][: 256 // size * size] in prefix_tokens.values()


def test_the_hashes_of_the_embedded_engine_are_those_of_vllms_sha256_cbor() -> None:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    from handlers.lmi_dist.block_hashes import digest_of

    kv_cache_utils.init_none_hash(sha256_cbor)
    tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 7]
    salt = (("cache_salt", "naïve"),)
    first = kv_cache_utils.hash_block_tokens(sha256_cbor, None, tokens, salt)
    second = kv_cache_utils.hash_block_tokens(sha256_cbor, first, tokens[:3])

    assert digest_of(None, tokens, salt) == first
    assert digest_of(first, tokens[:3]) == second
