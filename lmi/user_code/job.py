"""The calls in the process of user code: its end of their sockets, the thread that works on them, and what fails."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lmi.errors import is_out_of_memory, writable
from lmi.ipc import Accepted, FrameTooLarge, frame
from lmi.shared.log import follow
from lmi.shared.state import EngineRecord
from lmi.user_code.answer import UserAnswers
from lmi.user_code.messages import (
    MAX_CHUNK_BYTES,
    WINDOW,
    BodyChunk,
    Drop,
    End,
    Failed,
    Feed,
    Handle,
    Head,
    Open,
    ReadInput,
    Respond,
    Taken,
    ToFrontEnd,
    Work,
    decode_to_worker,
    encode,
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
            for chunk in chunks:
                for start in range(0, len(chunk) or 1, MAX_CHUNK_BYTES):  # an empty chunk is one empty message
                    self._room.acquire()
                    if self._is_over.is_set():
                        return
                    self._send(BodyChunk(self._id, chunk[start : start + MAX_CHUNK_BYTES]))


class CodeThread:
    """Works on one message after the other, and writes its progress into the record.

    The supervisor reads the record to find code that never returns (`lmi/supervisor/restarts.py`).
    """

    def __init__(self, record: EngineRecord) -> None:
        self._record = record
        self._queue: queue.SimpleQueue[tuple[Job, Work]] = queue.SimpleQueue()
        self._is_busy = False
        record.max_num_sequences = 1
        record.step_s = time.monotonic()
        threading.Thread(target=self._run, name="code", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._is_busy and self._queue.empty()

    def put(self, job: Job, message: Work) -> None:
        self._queue.put((job, message))

    def beat(self) -> None:
        """Write into the record that the process is alive, and how many messages wait."""
        self._record.beat_s = time.monotonic()
        follow(self._record.block.supervisor.log_level)
        self._record.num_waiting = self._queue.qsize()

    def _run(self) -> None:
        while True:
            job, message = self._queue.get()
            self._is_busy = True
            self._record.step_s = time.monotonic()
            self._record.num_running = 1
            job.work_on(message)
            self._record.step += 1
            self._record.num_running = 0
            self._is_busy = False


class CallConnection(Accepted):
    """One socket to one front end, with the calls that are open on it."""

    other_end = "a front end"

    def __init__(self, user_code: UserCode, thread: CodeThread) -> None:
        super().__init__()
        self._user_code = user_code
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, Job] = {}

    def take(self, payload: bytes) -> None:
        message = decode_to_worker(payload)
        call_id = message.call_id
        match message:
            case Taken():
                if job := self._jobs.get(call_id):
                    job.add_room()
            case Drop():
                if job := self._jobs.pop(call_id, None):
                    job.drop()
            case Feed():
                if job := self._jobs.get(call_id):
                    self._thread.put(job, message)
            case _:
                if call_id not in self._jobs:
                    self._jobs[call_id] = Job(call_id, self._user_code, self._send_from_thread)
                self._thread.put(self._jobs[call_id], message)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for job in self._jobs.values():
            job.drop()

    def _send_from_thread(self, message: ToFrontEnd) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is stopping
            self._loop.call_soon_threadsafe(self._send, message)

    def _send(self, message: ToFrontEnd) -> None:
        if isinstance(message, End | Failed):
            self._jobs.pop(message.call_id, None)
        try:
            self.write(frame(encode(message)))
        except FrameTooLarge as error:
            self._send(Failed(message.call_id, str(error)))


def describe(error: BaseException) -> str:
    """Return the last line of the traceback. Bytes in it that are not UTF-8 are replaced, so that it can be sent."""
    return writable(traceback.format_exception_only(error)[-1].strip())


def line_number(error: BaseException, path: str) -> int | None:
    """Return the line of the file at `path` that raised, None if the traceback does not name one."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None
