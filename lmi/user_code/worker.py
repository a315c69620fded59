"""The process that runs a model's own code: `handle`, or its formatters. Nothing else of ours does.

`python -m lmi.user_code.worker --slot N` imports the file, lets `handle` load, then serves front ends on a unix socket.
The main thread reads sockets, one more thread runs the code, one call after the other. The process has no secrets of
ours in its environment and no engine beside it; the supervisor logs what the code prints. Code that never returns is
seen by the supervisor in the record (`lmi/supervisor/restarts.py`), which ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from typing import Any

import lmi.shared.log
from lmi.engine.server import bind
from lmi.errors import ModelUnusable
from lmi.ipc.connection import Connection
from lmi.ipc.frames import FrameTooLarge, frame
from lmi.runtime import Runtime
from lmi.settings.config import CodeConfig, ModelConfig
from lmi.shared import processes
from lmi.shared.report import LoadReport, write_report
from lmi.shared.sink import guard_streams
from lmi.shared.state import EngineRecord, Phase
from lmi.user_code.messages import (
    MAX_PIECE_BYTES,
    WINDOW,
    Drop,
    End,
    Failed,
    Feed,
    Handle,
    Head,
    Open,
    Piece,
    ReadInput,
    Respond,
    Taken,
    ToFrontEnd,
    decode_to_worker,
    encode,
)

BEAT_S = 0.2
FINISH_S = 2.0  # for calls that are still open when the worker is told to stop

log = logging.getLogger("lmi.user_code.worker")  # this module is __main__ where it runs


class Job:
    """One call as the worker keeps it. `room` counts the pieces that may still be sent."""

    def __init__(self, front_end: FrontEnd, message: Handle | ReadInput | Open | Respond) -> None:
        self.front_end = front_end
        self.id = message.call_id
        self.request: Any = None  # of ReadInput: what the input formatter has returned
        self.answers: Any = None  # of Open: the output formatter's state
        self.is_dropped = threading.Event()
        self.room = threading.Semaphore(WINDOW)

    def drop(self) -> None:
        self.is_dropped.set()
        self.room.release()  # whoever waits for room looks up


class Bench:
    """Runs the code in a thread of its own and keeps the record."""

    def __init__(self, model: Any, record: EngineRecord) -> None:
        self._model = model
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Job, Handle | ReadInput | Open | Feed | Respond]] = queue.SimpleQueue()
        self._is_busy = False
        record.max_num_sequences = 1
        record.step_s = time.monotonic()
        threading.Thread(target=self._run, name="code", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._is_busy and self._jobs.empty()

    def put(self, job: Job, message: Handle | ReadInput | Open | Feed | Respond) -> None:
        self._jobs.put((job, message))

    def beat(self) -> None:
        self._record.beat_s = time.monotonic()
        self._record.num_waiting = self._jobs.qsize()

    def _run(self) -> None:
        while True:
            job, message = self._jobs.get()
            self._is_busy = True
            self._record.step_s = time.monotonic()
            self._record.num_running = 1
            if not job.is_dropped.is_set():
                self._work(job, message)
            self._record.step += 1
            self._record.num_running = 0
            self._is_busy = False

    def _work(self, job: Job, message: Handle | ReadInput | Open | Feed | Respond) -> None:
        try:
            if isinstance(message, Handle):
                self._handle(job, message)
            elif isinstance(message, ReadInput):
                job.request, body = self._model.read_input(message.properties, message.body)
                self._send(job, Piece(job.id, body))
                return
            elif isinstance(message, Respond):
                self._send(job, Piece(job.id, self._model.respond(message.body, job.request)))
                return
            elif isinstance(message, Open):
                job.answers = self._model.answers(message, job.request)
                self._send(job, Head(job.id, 200, job.answers.media_type, {}, message.is_streaming))
                return
            else:
                self._send(job, Piece(job.id, job.answers.feed(message)))
                if not job.answers.are_over:
                    return
            self._send(job, End(job.id))
        except BaseException as error:  # whatever the code raises, exit() and cancellation too, is this call's alone
            log.error("the model's code failed", exc_info=error)
            self._send(job, Failed(job.id, describe(error), is_out_of_memory(error)))

    def _handle(self, job: Job, message: Handle) -> None:
        with closing(self._model.handle(message.properties, message.query, message.body)) as answer:
            head = next(answer)
            self._send(job, Head(job.id, int(head.status), head.media_type, head.headers, head.is_streaming))
            self._send_all(job, answer)

    def _send_all(self, job: Job, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            for part in _cut(piece):
                job.room.acquire()
                if job.is_dropped.is_set():
                    return
                self._send(job, Piece(job.id, part))

    def _send(self, job: Job, message: ToFrontEnd) -> None:
        with suppress(RuntimeError):  # the loop is closed: we are stopping
            self._loop.call_soon_threadsafe(job.front_end.send, message)


class FrontEnd(Connection):
    """One socket to one front end."""

    other_end = "a front end"

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench
        self._jobs: dict[int, Job] = {}

    def take(self, payload: bytes) -> None:
        message = decode_to_worker(payload)
        job = self._jobs.get(message.call_id)
        if job is None and isinstance(message, Handle | ReadInput | Open | Respond):
            job = self._jobs[message.call_id] = Job(self, message)
        if job is None:
            return
        if isinstance(message, Taken):
            job.room.release()
        elif isinstance(message, Drop):
            self._jobs.pop(message.call_id).drop()
        else:
            self._bench.put(job, message)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for job in self._jobs.values():
            job.drop()

    def send(self, message: ToFrontEnd) -> None:
        if isinstance(message, End | Failed):
            self._jobs.pop(message.call_id, None)
        try:
            self.write(frame(encode(message)))
        except FrameTooLarge as error:
            self.send(Failed(message.call_id, str(error)))


async def serve(model: Any, record: EngineRecord, socket_path: str) -> None:
    """Serve until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    bench = Bench(model, record)
    server = await loop.create_unix_server(lambda: FrontEnd(bench), sock=bind(socket_path))
    beat = asyncio.create_task(_beat(bench))
    record.phase = Phase.READY
    await stop.wait()
    record.phase = Phase.DRAINING
    server.close()
    deadline_s = time.monotonic() + FINISH_S
    while not bench.is_idle and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    beat.cancel()


async def _beat(bench: Bench) -> None:
    while True:
        bench.beat()
        await asyncio.sleep(BEAT_S)


def load(code: CodeConfig, model: ModelConfig, record: EngineRecord) -> Any:
    """The model's functions, ready. Raises ModelUnusable with what the file raised."""
    python_model = importlib.import_module("handlers.python_model")
    record.stage = "import"
    try:
        functions = python_model.Functions(code.handler, code.output_formatter, code.input_formatter)
        python = python_model.load(code.path, functions, code.properties, model.path, model.name)
        record.stage = "initialise"
        python.begin()
    except BaseException as error:
        log.error("%s cannot be used", code.path, exc_info=error)
        raise ModelUnusable(f"{code.path}: {_place(error, code.path)}{describe(error)}") from error
    return python


def run(slot: int) -> int:
    """Load, serve, stop; returns the exit code."""
    runtime = Runtime.from_environ()
    config, code = runtime.config, runtime.config.code
    assert code is not None
    record = runtime.code_records(runtime.attach())[slot]
    record.claim()
    record.phase = Phase.LOADING
    processes.set_title(f"lmi-code-{slot}")
    lmi.shared.log.setup(f"code {slot}", config.server.log_level, config.server.log_format, processes.log_fd())
    lmi.shared.log.count_dropped_in(record)
    try:
        started_s = time.monotonic()
        model = load(code, config.model, record)
        if code.handler is not None:
            _report(runtime, slot, time.monotonic() - started_s)
        record.stage = ""
        asyncio.run(serve(model, record, runtime.code_socket(slot)))
    except ModelUnusable as error:
        record.reason = str(error)
        return error.exit_code
    except Exception as error:
        record.reason = describe(error)
        log.exception("the process of the model's code failed")
        return 1
    return 0


def describe(error: BaseException) -> str:
    """The last line of a traceback, as text that can be sent: a message may hold bytes that are no UTF-8."""
    return traceback.format_exception_only(error)[-1].strip().encode(errors="replace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    """Of the process, or of an accelerator: libraries have classes of their own for that, all of this name."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _place(error: BaseException, path: str) -> str:
    """Where in the file it was, as far as the traceback tells."""
    lines = [place.lineno for place in traceback.extract_tb(error.__traceback__) if place.filename == path]
    number = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"line {number}: " if number else ""


def _report(runtime: Runtime, slot: int, seconds: float) -> None:
    """What the supervisor shows people."""
    write_report(runtime.engine_report(slot), LoadReport(engine="model.py", stages_s={"load": seconds}))


def _cut(piece: bytes) -> Iterator[bytes]:
    for start in range(0, len(piece) or 1, MAX_PIECE_BYTES):
        yield piece[start : start + MAX_PIECE_BYTES]


def main() -> None:
    parser = argparse.ArgumentParser(prog="lmi.user_code.worker", description=__doc__)
    parser.add_argument("--slot", type=int, required=True)
    guard_streams()
    processes.print_lines_at_once()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    code = run(parser.parse_args().slot)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the code must not hold up the end


if __name__ == "__main__":
    main()
