"""The process of user code. No other process imports the model's file.

`python -m lmi.user_code.worker --slot N` imports the file, lets `handle` load, then serves front ends on a unix socket.
The main thread reads sockets, the code thread runs the code. The environment has no secrets of the server, and the
supervisor logs what the code prints. It reads the record too, and ends a process whose code never returns
(`lmi/supervisor/restarts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import replace
from functools import partial

from lmi.errors import ModelUnusable
from lmi.ipc import listen
from lmi.runtime import LoadReport, Runtime
from lmi.settings.config import ModelConfig, UserCodeConfig
from lmi.shared import slot_process
from lmi.shared.cores import keep as keep_to_cores
from lmi.shared.state import EngineRecord, Phase
from lmi.user_code import runner
from lmi.user_code.job import CallConnection, CodeThread, describe, line_number
from lmi.user_code.runner import UserCode

ENDING = (signal.SIGTERM, signal.SIGINT)
BEAT_S = 0.2
FINISH_S = 2.0  # for the message that the code still works on after SIGTERM

log = logging.getLogger("lmi.user_code.worker")  # this module is __main__ where it runs


async def serve(user_code: UserCode, record: EngineRecord, socket_path: str) -> None:
    """Serve until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for signum in ENDING:
        loop.add_signal_handler(signum, stop.set)
    thread = CodeThread(record)
    server = await listen(lambda: CallConnection(user_code, thread), socket_path)
    beat = asyncio.create_task(_beat(thread))
    record.phase = Phase.READY
    await stop.wait()
    record.phase = Phase.DRAINING
    server.close()
    deadline_s = time.monotonic() + FINISH_S
    while not thread.is_idle and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    beat.cancel()
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)  # one that came while the loop closes would find its pipe closed


async def _beat(thread: CodeThread) -> None:
    while True:
        thread.beat()
        await asyncio.sleep(BEAT_S)


def load(code: UserCodeConfig, model: ModelConfig, record: EngineRecord) -> UserCode:
    """Import the file and let its handler load. Raises ModelUnusable with what the file raised."""
    record.stage = "import"
    try:
        user_code = runner.load(code, folder=model.path, name=model.name)
        record.stage = "initialise"
        user_code.begin()
    except BaseException as error:
        log.error("%s cannot be used", code.path, exc_info=error)
        number = line_number(error, code.path)
        place = f"line {number}: " if number else ""
        raise ModelUnusable(f"{code.path}: {place}{describe(error)}") from error
    return user_code


def run(slot: int) -> int:
    """Load, serve, stop. Returns the exit code."""
    runtime = Runtime.from_environ()
    record, server = runtime.user_code_records(runtime.attach())[slot], runtime.config.server
    body = partial(_load_and_serve, runtime, slot, record)
    return slot_process.live(record, f"code {slot}", server.log_level, server.log_format, body)


def _load_and_serve(runtime: Runtime, slot: int, record: EngineRecord) -> None:
    code = runtime.config.user_code
    assert code is not None
    started_s = time.monotonic()
    user_code = load(with_sessions(code, runtime), runtime.config.model, record)
    if code.handler is not None:
        runtime.write_report(slot, LoadReport(engine="model.py", stages_s={"load": time.monotonic() - started_s}))
    record.stage = ""
    keep_to_cores()
    asyncio.run(serve(user_code, record, runtime.user_code_socket(slot)))


def with_sessions(code: UserCodeConfig, runtime: Runtime) -> UserCodeConfig:
    """Add the place and the length of sessions, which djl_python's SessionManager reads from the properties."""
    server = runtime.config.server
    sessions = {
        "sessions_path": str(runtime.sessions_path),
        "sessions_expiration": f"{server.sessions_expiration_s:.15g}",
    }
    return replace(code, properties=sessions | code.properties)


if __name__ == "__main__":
    slot_process.main("lmi.user_code.worker", __doc__, run)
