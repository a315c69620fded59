"""The last batches, which a subscriber that missed some asks for again."""

import logging
from collections import deque
from typing import Any, NamedTuple

from handlers.base.kv_events.sockets import open_socket, zmq_library

# It stands in the place of a number and says that nothing more is kept.
LAST = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger(__package__)


class SentBatch(NamedTuple):
    number: int
    payload: bytes

    def frames(self, topic: bytes) -> tuple[bytes, bytes, bytes]:
        """The message of the batch, as vLLM has it."""
        return topic, self.number.to_bytes(8, "big"), self.payload


class Replay:
    """The second socket, with the batches that it can send again."""

    def __init__(self, endpoint: str, topic: bytes, max_kept: int) -> None:
        """Raises BadConfiguration if the socket cannot be had."""
        zmq = zmq_library()
        self.socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        open_socket(self.socket, endpoint, is_listening=True)
        self._topic = topic
        self._kept: deque[SentBatch] = deque(maxlen=max_kept)

    def keep(self, batch: SentBatch) -> None:
        """Keep a batch, and forget the oldest if there are too many."""
        self._kept.append(batch)

    def answer(self) -> None:
        """Send the kept batches from the number on that a subscriber asks for, and then the frame
        that says that these were all.
        """
        match self.socket.recv_multipart():
            case [client, b"", first] if len(first) == len(LAST):
                first_number = int.from_bytes(first, "big")
            case frames:
                log.warning(
                    "a request for events of the KV cache is not one number of 8 bytes: %d frames",
                    len(frames),
                )
                return

        for batch in self._kept:
            if batch.number >= first_number:
                self.socket.send_multipart((client, b"", *batch.frames(self._topic)))

        self.socket.send_multipart((client, b"", b"", LAST, b""))
