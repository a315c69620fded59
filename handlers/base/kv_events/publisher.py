"""Tells routers what a KV cache keeps and forgets, in the messages of vLLM over ZeroMQ.

A router that knows which replica has the beginning of a prompt sends the prompt there. A subscriber
gets batches of events, each with the next number. One that misses a number asks for it again at the
second socket, where the last batches are kept. Nobody waits for a subscriber: one that is too slow
misses batches.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from types import ModuleType
from typing import Any

import msgspec

from lmi.errors import BadConfiguration
from lmi.settings.annexes import KvEventsConfig
from lmi.shared.linux import REPLICA

KEY = "option.kv_events_config"
INSTALL = "scripts/install kv-events, pip install pyzmq"
CLOSE_TIMEOUT_S = 1.0
# It stands in the place of a number and says that nothing more is kept.
LAST = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger(__name__)


class CacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """A change of the cache. Names and order of the fields are vLLM's."""


class BlockStored(CacheEvent):
    """Blocks that follow each other, with all their tokens. `parent_block_hash` is the block before
    them, if any.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int  # tokens
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


class CacheEventBatch(msgspec.Struct, array_like=True):
    """The changes of a step."""

    # Seconds since the epoch.
    ts: float
    events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]
    # The number of the replica.
    data_parallel_rank: int


def replica_here() -> int:
    """Return which replica of a server this process is, 0 outside of a server."""
    return int(os.environ.get(REPLICA, "0"))


def of_replica(config: KvEventsConfig, replica: int, num_replicas: int) -> KvEventsConfig:
    """Return the configuration with the sockets of one replica: those that are bound have its own
    port or name.

    Raises BadConfiguration if two replicas would bind one port.
    """
    endpoint = config.endpoint
    replay = config.replay_endpoint
    if replay is not None and is_bound(endpoint):
        events_port = _port(endpoint)
        replay_port = _port(replay)
        if events_port and replay_port and abs(events_port - replay_port) < num_replicas:
            apart = f"ports of endpoint and replay_endpoint that lie at least {num_replicas} apart"
            raise BadConfiguration(
                f"{KEY}: each replica has ports of its own, so allowed are {apart}"
            )

    if is_bound(endpoint):
        endpoint = _endpoint_of(endpoint, replica)

    if replay is not None:
        replay = _endpoint_of(replay, replica)

    return msgspec.structs.replace(config, endpoint=endpoint, replay_endpoint=replay)


def is_bound(endpoint: str) -> bool:
    """Return whether the socket of events listens there. As at vLLM, it connects to any other
    address.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _endpoint_of(endpoint: str, replica: int) -> str:
    port = _port(endpoint)
    if not replica or port == 0:
        return endpoint

    if port is None:
        return f"{endpoint}_dp{replica}"

    return f"{endpoint.rpartition(':')[0]}:{port + replica}"


def _port(endpoint: str) -> int | None:
    """Return the port of a TCP endpoint, 0 where the kernel chooses it."""
    if not endpoint.startswith("tcp://"):
        return None

    return int(endpoint.rpartition(":")[2])


class EventPublisher:
    """Numbers batches of events from 0 and publishes them, on a thread of its own."""

    def __init__(self, config: KvEventsConfig, replica: int = 0) -> None:
        """`config` has the sockets of this replica. Raises BadConfiguration if they
        cannot be had.
        """
        self._zmq = _zmq()
        self._topic = config.topic.encode()
        self._replica = replica
        self._numbers = count()
        self._encode = msgspec.msgpack.Encoder().encode
        # A queue that is full forgets its oldest batch.
        self._queue: deque[tuple[int, CacheEventBatch]] = deque(maxlen=config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._is_closing = False

        context = self._zmq.Context.instance()
        self._events = context.socket(self._zmq.PUB)
        self._events.set_hwm(config.hwm)
        self._replay = None if config.replay_endpoint is None else context.socket(self._zmq.ROUTER)
        try:
            self._open(config)
        except BadConfiguration:
            self._close_sockets()
            raise

        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Hand a batch to the thread. It never waits."""
        batch = CacheEventBatch(time.time(), events, self._replica)
        self._queue.append((next(self._numbers), batch))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Publish what was handed over, as far as that takes no longer than a moment, and close the
        sockets.
        """
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _open(self, config: KvEventsConfig) -> None:
        sockets = [(self._events, config.endpoint, is_bound(config.endpoint))]
        if self._replay is not None and config.replay_endpoint is not None:
            sockets.append((self._replay, config.replay_endpoint, True))

        for socket, endpoint, is_listening in sockets:
            open_socket = socket.bind if is_listening else socket.connect
            try:
                open_socket(endpoint)
            except self._zmq.ZMQError as error:
                verb = "bound" if is_listening else "connected to"
                raise BadConfiguration(
                    f"{KEY}: {endpoint} cannot be {verb}: {error.strerror}"
                ) from error

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)

        while not (self._is_closing and not self._queue):
            try:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._send_queued()

                if self._replay in ready:
                    self._answer_replay()
            except Exception as error:
                log.error("events of the KV cache cannot be sent: %s", error)

        self._close_sockets()

    def _send_queued(self) -> None:
        while self._queue:
            number, batch = self._queue.popleft()
            payload = self._encode(batch)
            self._kept.append((number, payload))
            self._events.send_multipart(self._frames(number, payload))

    def _answer_replay(self) -> None:
        """Send the kept batches from a number on, and then the frame that says that
        these were all.
        """
        assert self._replay is not None
        match self._replay.recv_multipart():
            case [client, b"", first] if len(first) == len(LAST):
                first_number = int.from_bytes(first, "big")
            case frames:
                log.warning(
                    "a request for events of the KV cache is not one number of 8 bytes: %d frames",
                    len(frames),
                )
                return

        for number, payload in self._kept:
            if number >= first_number:
                self._replay.send_multipart((client, b"", *self._frames(number, payload)))

        self._replay.send_multipart((client, b"", b"", LAST, b""))

    def _frames(self, number: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
        return self._topic, number.to_bytes(8, "big"), payload

    def _close_sockets(self) -> None:
        for socket in self._sockets():
            socket.close(linger=0)

    def _sockets(self) -> Iterator[Any]:
        yield self._events
        if self._replay is not None:
            yield self._replay


def _zmq() -> ModuleType:
    """Return ZeroMQ's library, which only this option needs. Raises BadConfiguration if it is not
    installed.
    """
    try:
        import zmq
    except ImportError:
        raise BadConfiguration(f"{KEY} needs pyzmq, which is not installed: {INSTALL}") from None

    return zmq
