"""The worker's end of the user code socket. It turns messages of front ends into jobs of the code thread."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lmi.ipc.frames import FrameTooLarge, frame
from lmi.ipc.listener import Accepted
from lmi.user_code.job import CodeThread, Job
from lmi.user_code.messages import (
    Drop,
    End,
    Failed,
    Feed,
    Taken,
    ToFrontEnd,
    decode_to_worker,
    encode,
)
from lmi.user_code.runner import UserCode


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
