"""Batches of events of a cache over ZeroMQ: numbered, sent again on request, and no burden for the
engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handlers.base.kv_events.endpoints import of_replica
from handlers.base.kv_events.events import BlockRemoved
from handlers.base.kv_events.publisher import EventPublisher
from handlers.base.kv_events.replay import LAST
from lmi.errors import BadConfiguration
from lmi.settings.annexes import KV_EVENTS, KvEventsConfig
from tests.machine import wait_until

zmq: Any = pytest.importorskip("zmq")
TIMEOUT_MS = 60_000


@contextmanager
def publisher(folder: Path, **fields: Any) -> Iterator[EventPublisher]:
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
        topic="kv@pod@model",
        **fields,
    )
    publisher = EventPublisher(config, replica=3)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def socket(kind: int, endpoint: str) -> Iterator[Any]:
    with zmq.Context.instance().socket(kind) as connected:
        connected.linger = 0
        connected.rcvtimeo = TIMEOUT_MS
        connected.connect(endpoint)
        yield connected


def replayed(folder: Path, first: int) -> list[tuple[int, int]]:
    """The number of each kept batch from `first` on, and the block that it names."""
    with socket(zmq.DEALER, f"ipc://{folder}/replay") as asking:
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        events = []
        while (frames := asking.recv_multipart()) != [b"", b"", LAST, b""]:
            _, topic, number, payload = frames
            assert topic == b"kv@pod@model"
            events.append(
                (
                    int.from_bytes(number, "big"),
                    msgspec.msgpack.decode(payload)[1][0]["block_hashes"][0],
                )
            )

        return events


def test_a_subscriber_gets_numbered_batches_and_what_it_missed_on_request(tmp_path: Path) -> None:
    with (
        publisher(tmp_path) as publishing,
        socket(zmq.SUB, f"ipc://{tmp_path}/events") as subscriber,
    ):
        subscriber.subscribe(b"kv@")
        published = 0
        # It has not joined yet
        while not subscriber.poll(10):
            publishing.publish([BlockRemoved([100 + published], "GPU", 0)])
            published += 1

        topic, number, payload = subscriber.recv_multipart()
        event_number = int.from_bytes(number, "big")
        timestamp, events, replica = msgspec.msgpack.decode(payload)

        assert topic == b"kv@pod@model" and timestamp > 1e9 and replica == 3
        assert events == [
            {
                "type": "BlockRemoved",
                "block_hashes": [100 + event_number],
                "medium": "GPU",
                "group_idx": 0,
            }
        ]
        assert replayed(tmp_path, 0)[: event_number + 1] == [
            (missed, 100 + missed) for missed in range(event_number + 1)
        ]


def test_only_the_last_batches_are_kept(tmp_path: Path) -> None:
    with publisher(tmp_path, buffer_steps=2) as publishing:
        for block in range(5):
            publishing.publish([BlockRemoved([block], "GPU", 0)])

        wait_until(lambda: replayed(tmp_path, 0)[-1:] == [(4, 4)], "the last one was sent")
        assert replayed(tmp_path, 0) == [(3, 3), (4, 4)]
        assert replayed(tmp_path, 9) == []


def test_a_request_that_is_no_number_harms_nobody(tmp_path: Path) -> None:
    with publisher(tmp_path) as publishing:
        with socket(zmq.DEALER, f"ipc://{tmp_path}/replay") as stranger:
            stranger.send_multipart([b"", b"no number"])
            stranger.send_multipart([b"one frame"])

        publishing.publish([BlockRemoved([7], "GPU", 0)])
        wait_until(lambda: replayed(tmp_path, 0) == [(0, 7)], "it answers")


def test_a_socket_that_cannot_be_had_ends_the_start_with_its_endpoint(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=f"ipc://{tmp_path}/missing/events cannot be bound"):
        EventPublisher(KvEventsConfig(endpoint=f"ipc://{tmp_path}/missing/events"))


def test_without_pyzmq_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(
        BadConfiguration, match="needs pyzmq, which is not installed: scripts/install kv-events"
    ):
        EventPublisher(KvEventsConfig())


def test_each_replica_binds_sockets_of_its_own_and_all_connect_to_one_router() -> None:
    bound = KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657")
    kv_config = KvEventsConfig(endpoint="ipc:///run/events", replay_endpoint="ipc:///run/replay")
    router = KvEventsConfig(endpoint="tcp://router:5557")

    def endpoints(config: KvEventsConfig) -> tuple[str, str | None]:
        replica_config = of_replica(config, 2, num_replicas=3)
        return replica_config.endpoint, replica_config.replay_endpoint

    assert of_replica(bound, 0, num_replicas=3) == bound
    assert endpoints(bound) == ("tcp://*:5559", "tcp://*:5659")
    assert endpoints(kv_config) == ("ipc:///run/events_dp2", "ipc:///run/replay_dp2")
    assert endpoints(router) == ("tcp://router:5557", None)

    close = KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    assert of_replica(close, 0, num_replicas=1) == close

    with pytest.raises(BadConfiguration, match="at least 2 apart"):
        of_replica(close, 0, num_replicas=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "true",
        "[]",
        '{"endpoind": "tcp://*:5557"}',
        '{"endpoint": "5557"}',
        '{"endpoint": "tcp://*"}',
    ]
    + [
        '{"publisher": "kafka"}',
        '{"hwm": -1}',
        '{"max_queue_size": 0}',
        '{"replay_endpoint": "http://a:1"}',
    ],
)
def test_a_configuration_that_is_not_vllms_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        KV_EVENTS.parse(text)
