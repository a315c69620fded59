"""The process of user code: it imports the model's file, which no other does, and serves front ends
on a unix socket.

The main thread reads sockets, the code thread runs the code. The environment has no secrets of the
server.
"""

import asyncio
import logging
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmi.adapters.files import SCRIPT
from lmi.errors import ModelUnusable, OutOfMemory, UserCodeFailed, is_out_of_memory, writable
from lmi.ipc import Accepted, FrameTooLarge, frame, listen
from lmi.runtime import LoadReport, Runtime
from lmi.settings.config import ModelConfig
from lmi.shared import linux, slot_process
from lmi.shared.log import follow
from lmi.shared.state import EngineRecord, Phase
from lmi.user_code import calls, runner
from lmi.user_code.answer import TokenAnswer
from lmi.user_code.calls import (
    MAX_CHUNK_BYTES,
    WINDOW,
    AdapterCode,
    End,
    Head,
    ToFrontEnd,
    Work,
)
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import UserCode

ENDING = (signal.SIGTERM, signal.SIGINT)
BEAT_S = 0.2
# How long the code may go on with the message that it works on at SIGTERM.
FINISH_S = 2.0

# Where this module runs, its name is __main__.
log = logging.getLogger("lmi.user_code.worker")


class Job:
    """One call. `send` may be called from any thread.

    A message that comes after the call was dropped or has failed has no effect.
    """

    def __init__(
        self, call_id: int, user_code: UserCode, send: Callable[[ToFrontEnd], None]
    ) -> None:
        self._id = call_id
        self._user_code = user_code
        self._send = send
        # What the input formatter returned.
        self._request: Any = None
        # One answer for each prompt.
        self._answers: list[TokenAnswer] = []
        self._is_over = threading.Event()
        # How many chunks of `handle` may still be sent.
        self.room = threading.Semaphore(WINDOW)

    def drop(self) -> None:
        self._is_over.set()
        # This wakes the thread if it waits for room.
        self.room.release()

    def work_on(self, message: Work) -> None:
        """Run the code for one message. An exception in it, even SystemExit, fails only this
        call.
        """
        if self._is_over.is_set():
            return

        try:
            if self._is_last(message):
                self._send(End())
        except BaseException as error:
            log.error("the model's code failed", exc_info=error)
            self._is_over.set()
            kind = OutOfMemory if is_out_of_memory(error) else UserCodeFailed
            self._send(End(kind(describe(error)).info))

    def _is_last(self, message: Work) -> bool:
        """Send what the code makes of the message. Returns whether the call ends with this
        message.
        """
        match message:
            case calls.Handle():
                self._handle(message)
                return True
            case calls.LoadCode():
                kinds = self._user_code.load_code(message.adapter)
                self._send(" ".join(kinds).encode())
                return True
            case calls.ReadInput():
                self._request, body = self._user_code.read_input(
                    message.properties, message.body, message.adapter
                )
                self._send(body)
            case calls.Respond():
                body = self._user_code.respond(message.body, self._request, message.adapter)
                self._send(body)
            case calls.Open():
                self._answers = self._user_code.answers(message, self._request, self._id)
                self._send(Head(200, self._answers[0].media_type, {}, message.is_streaming))
            case calls.Feed():
                self._send(self._answers[message.index].feed(message))
                return all(answer.is_over for answer in self._answers)

        return False

    def _handle(self, message: calls.Handle) -> None:
        generator = self._user_code.handle(message.properties, message.query, message.body)
        with closing(generator) as pieces:
            for piece in pieces:
                if isinstance(piece, Head):
                    self._send(piece)
                    continue

                # An empty piece is sent as one empty chunk.
                for start in range(0, len(piece) or 1, MAX_CHUNK_BYTES):
                    self.room.acquire()
                    if self._is_over.is_set():
                        return

                    self._send(piece[start : start + MAX_CHUNK_BYTES])


class CodeThread:
    """Works on one message after the other. Its progress is in the record, where the supervisor
    sees a hang.
    """

    def __init__(self, record: EngineRecord) -> None:
        self._record = record
        self.queue: queue.SimpleQueue[tuple[Job, Work]] = queue.SimpleQueue()
        record.max_num_sequences = 1
        record.step_s = time.monotonic()
        threading.Thread(target=self._run, name="code", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._record.num_running and self.queue.empty()

    async def beat(self) -> None:
        """Write into the record, again and again, that the process is alive and how many messages
        wait.
        """
        while True:
            self._record.beat_s = time.monotonic()
            follow(self._record.block.supervisor.log_level)
            self._record.num_waiting = self.queue.qsize()
            await asyncio.sleep(BEAT_S)

    def _run(self) -> None:
        while True:
            job, message = self.queue.get()
            self._record.step_s = time.monotonic()
            self._record.num_running = 1
            job.work_on(message)
            self._record.step += 1
            self._record.num_running = 0


class CallConnection(Accepted):
    """One socket to one front end, with the calls that are open on it."""

    other_end = "a front end"

    def __init__(self, user_code: UserCode, thread: CodeThread) -> None:
        super().__init__()
        self._user_code = user_code
        self._thread = thread
        self._jobs: dict[int, Job] = {}

    def take(self, payload: bytes) -> None:
        call_id, message = calls.decode_to_worker(payload)
        job = self._jobs.get(call_id)
        if job is None:
            # These never begin a call, so theirs has ended.
            if isinstance(message, calls.Taken | calls.Drop | calls.Feed):
                return

            job = Job(call_id, self._user_code, partial(self._send_from_thread, call_id))
            self._jobs[call_id] = job

        if isinstance(message, calls.Taken):
            job.room.release()
        elif isinstance(message, calls.Drop):
            del self._jobs[call_id]
            job.drop()
        else:
            self._thread.queue.put((job, message))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for job in self._jobs.values():
            job.drop()

    def _send_from_thread(self, call_id: int, message: ToFrontEnd) -> None:
        # When the process is stopping, the loop is closed.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._send, call_id, message)

    def _send(self, call_id: int, message: ToFrontEnd) -> None:
        if isinstance(message, End):
            self._jobs.pop(call_id, None)

        try:
            self.write(frame(calls.encode((call_id, message))))
        except FrameTooLarge as error:
            self._send(call_id, End(UserCodeFailed(str(error)).info))


def describe(error: BaseException) -> str:
    """Return the last line of the traceback. Bytes in it that are not UTF-8 are replaced, so that
    it can be sent.
    """
    return writable(traceback.format_exception_only(error)[-1].strip())


async def serve(user_code: UserCode, record: EngineRecord, socket_path: str) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in ENDING:
        loop.add_signal_handler(signum, stop.set)

    thread = CodeThread(record)
    server = await listen(lambda: CallConnection(user_code, thread), socket_path)
    beat = asyncio.create_task(thread.beat())
    record.phase = Phase.READY
    await stop.wait()

    record.phase = Phase.DRAINING
    server.close()
    deadline_s = time.monotonic() + FINISH_S
    while not thread.is_idle and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)

    beat.cancel()
    # A signal that came while the loop closes would find the loop's pipe closed.
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)


def load(code: UserCodeConfig, model: ModelConfig, record: EngineRecord) -> UserCode:
    """Import the file and let its handler load. Raises ModelUnusable with what the file raised, and
    its line.
    """
    record.stage = "import"
    try:
        user_code = runner.load(code, folder=model.path, name=model.name)
        record.stage = "initialise"
        user_code.begin()
    except BaseException as error:
        raise unusable(code.path, error) from error

    if code.runs_adapters:
        _load_adapters(user_code, model)

    return user_code


def _load_adapters(user_code: UserCode, model: ModelConfig) -> None:
    """Import the code of adapters beside the model. Raises ModelUnusable with what it raised."""
    for name, folder in model.adapters.items():
        adapter = AdapterCode.of(name, Path(folder, SCRIPT))
        if adapter is None:
            continue

        try:
            user_code.load_code(adapter)
        except BaseException as error:
            raise unusable(adapter.path, error) from error


def unusable(path: str, error: BaseException) -> ModelUnusable:
    """Log what a file has raised as it was loaded, and return the error that says so."""
    log.error("%s cannot be used", path, exc_info=error)
    line_number = _line_of(error, path)
    place = f"line {line_number}: " if line_number else ""
    return ModelUnusable(f"{path}: {place}{describe(error)}")


def _line_of(error: BaseException, path: str) -> int | None:
    """Return the innermost line of the file at which the error was raised, or None outside it."""
    if isinstance(error, SyntaxError):
        return error.lineno

    line_number = None
    for call in traceback.extract_tb(error.__traceback__):
        if call.filename == path:
            line_number = call.lineno

    return line_number


def run(slot: int) -> int:
    """Load, serve, stop. Returns the exit code."""
    runtime = Runtime.from_environ()
    socket, record = calls.ends(runtime.path, runtime.attach())[slot]
    server = runtime.config.server
    configured_code = runtime.config.user_code
    assert configured_code is not None

    # djl_python's SessionManager reads these two.
    sessions = {
        "sessions_path": str(runtime.sessions_path),
        "sessions_expiration": f"{server.sessions_expiration_s:.15g}",
    }
    code = replace(configured_code, properties=sessions | configured_code.properties)

    def live() -> None:
        started_s = time.monotonic()
        user_code = load(code, runtime.config.model, record)
        if code.handler is not None:
            load_s = time.monotonic() - started_s
            runtime.write_report(slot, LoadReport(engine="model.py", stages_s={"load": load_s}))

        record.stage = ""
        linux.keep_to_cores()
        asyncio.run(serve(user_code, record, socket))

    return slot_process.live(record, f"code {slot}", server.log_level, server.log_format, live)


if __name__ == "__main__":
    slot_process.main("lmi.user_code.worker", __doc__, run)
