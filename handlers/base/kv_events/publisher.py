"""Publishes the changes of a cache, on a thread of its own."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from handlers.base.kv_events.endpoints import is_bound
from handlers.base.kv_events.events import CacheEvent, CacheEventBatch
from handlers.base.kv_events.replay import Replay, SentBatch
from handlers.base.kv_events.sockets import open_socket, zmq_library
from lmi.errors import BadConfiguration
from lmi.settings.annexes import KvEventsConfig

CLOSE_TIMEOUT_S = 1.0

log = logging.getLogger(__package__)


class QueuedBatch(NamedTuple):
    number: int
    batch: CacheEventBatch


class EventPublisher:
    """Numbers batches of events from 0 and publishes them."""

    def __init__(self, config: KvEventsConfig, replica: int = 0) -> None:
        """`config` has the sockets of this replica. Raises BadConfiguration if they cannot be
        had.
        """
        self._zmq = zmq_library()
        self._topic = config.topic.encode()
        self._replica = replica
        self._numbers = count()
        self._encode = msgspec.msgpack.Encoder().encode
        # A queue that is full forgets its oldest batch.
        self._queue: deque[QueuedBatch] = deque(maxlen=config.max_queue_size)
        self._is_closing = False

        self._events: Any = self._zmq.Context.instance().socket(self._zmq.PUB)
        self._events.set_hwm(config.hwm)
        open_socket(self._events, config.endpoint, is_listening=is_bound(config.endpoint))
        self._replay = self._new_replay(config)

        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: Sequence[CacheEvent]) -> None:
        """Hand a batch to the thread. It never waits."""
        batch = CacheEventBatch(time.time(), changes, self._replica)
        self._queue.append(QueuedBatch(next(self._numbers), batch))
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

    def _new_replay(self, config: KvEventsConfig) -> Replay | None:
        if config.replay_endpoint is None:
            return None

        try:
            return Replay(config.replay_endpoint, self._topic, config.buffer_steps)
        except BadConfiguration:
            self._events.close(linger=0)
            raise

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay.socket, self._zmq.POLLIN)

        while self._queue or not self._is_closing:
            try:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._send_queued()

                if self._replay is not None and self._replay.socket in ready:
                    self._replay.answer()
            except Exception as error:
                log.error("events of the KV cache cannot be sent: %s", error)

        self._events.close(linger=0)
        if self._replay is not None:
            self._replay.socket.close(linger=0)

    def _send_queued(self) -> None:
        while self._queue:
            queued = self._queue.popleft()
            batch = SentBatch(queued.number, self._encode(queued.batch))
            if self._replay is not None:
                self._replay.keep(batch)

            self._events.send_multipart(batch.frames(self._topic))
