"""One call in the process of user code. The code thread works on its messages here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lmi.user_code.answer import UserAnswers
from lmi.user_code.faults import describe, is_out_of_memory
from lmi.user_code.messages import (
    MAX_CHUNK_BYTES,
    WINDOW,
    BodyChunk,
    End,
    Failed,
    Feed,
    Handle,
    Head,
    Open,
    ReadInput,
    Respond,
    ToFrontEnd,
    Work,
)
from lmi.user_code.runner import UserCode

log = logging.getLogger(__name__)


class Job:
    """One call. `send` may be called from any thread.

    After the call is dropped or has failed, its remaining messages have no effect.
    """

    def __init__(self, call_id: int, user_code: UserCode, send: Callable[[ToFrontEnd], None]) -> None:
        self._id = call_id
        self._user_code = user_code
        self._send = send
        self._request: Any = None  # what the input formatter returned
        self._answers: UserAnswers | None = None
        self._is_over = threading.Event()
        self._room = threading.Semaphore(WINDOW)  # chunks of `handle` that may still be sent

    def drop(self) -> None:
        self._is_over.set()
        self._room.release()  # wakes the thread if it waits for room

    def add_room(self) -> None:
        """Note that the front end took one chunk."""
        self._room.release()

    def work_on(self, message: Work) -> None:
        """Run the code for one message. An exception in it, even SystemExit, fails only this call."""
        if self._is_over.is_set():
            return
        try:
            if self._is_last(message):
                self._send(End(self._id))
        except BaseException as error:
            log.error("the model's code failed", exc_info=error)
            self._is_over.set()
            self._send(Failed(self._id, describe(error), is_out_of_memory(error)))

    def _is_last(self, message: Work) -> bool:
        """Send what the code makes of the message. Returns whether the call ends with this message."""
        match message:
            case Handle():
                self._handle(message)
                return True
            case ReadInput():
                self._request, body = self._user_code.read_input(message.properties, message.body)
                self._send(BodyChunk(self._id, body))
            case Respond():
                self._send(BodyChunk(self._id, self._user_code.respond(message.body, self._request)))
            case Open():
                self._answers = self._user_code.answers(message, self._request)
                self._send(Head(self._id, 200, self._answers.media_type, {}, message.is_streaming))
            case Feed():
                assert self._answers is not None, "Feed came before Open"
                self._send(BodyChunk(self._id, self._answers.feed(message)))
                return self._answers.are_over
        return False

    def _handle(self, message: Handle) -> None:
        with self._user_code.handle(message.properties, message.query, message.body) as (head, chunks):
            self._send(Head(self._id, head.status, head.media_type, head.headers, head.is_streaming))
            self._send_all(chunks)

    def _send_all(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            for part in _parts(chunk):
                self._room.acquire()
                if self._is_over.is_set():
                    return
                self._send(BodyChunk(self._id, part))


def _parts(chunk: bytes) -> Iterator[bytes]:
    """Yield the chunk in parts that fit into a message. An empty chunk is one empty part."""
    for start in range(0, len(chunk) or 1, MAX_CHUNK_BYTES):
        yield chunk[start : start + MAX_CHUNK_BYTES]
