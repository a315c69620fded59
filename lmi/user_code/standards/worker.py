"""The process of user code for AWS's model-hosting-container-standards: it serves front ends on a
unix socket with the app that `app.py` makes, many requests at once.

All of it runs in one event loop, as in AWS's own images. Code that blocks it for longer than
`step_timeout` counts as hung.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from starlette.types import ASGIApp

from lmi.errors import UserCodeFailed
from lmi.ipc import Accepted, FrameTooLarge, frame, listen
from lmi.runtime import Runtime
from lmi.settings.config import ModelConfig
from lmi.shared import linux, slot_process
from lmi.shared.log import follow
from lmi.shared.state import EngineRecord, Phase
from lmi.user_code import calls as sockets
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.standards import calls
from lmi.user_code.standards.app import build
from lmi.user_code.standards.calls import NO_CALL, Doors, Serve
from lmi.user_code.standards.conversation import RunningRequest
from lmi.user_code.standards.settings import imported_from
from lmi.user_code.worker import BEAT_S, ENDING, FINISH_S, unusable

SESSIONS = "SAGEMAKER_SESSIONS_PATH"
# The folder that has only what stands for vLLM in it.
COMPAT = Path(__file__).parent / "compat"

# Where this module runs, its name is __main__.
log = logging.getLogger("lmi.user_code.standards.worker")


class AppEnd(Accepted):
    """One socket to one front end, with the calls that are open on it."""

    other_end = "a front end"

    def __init__(self, app: ASGIApp, doors: Doors, record: EngineRecord) -> None:
        super().__init__()
        self._app = app
        self._doors = doors
        self._record = record
        self._calls: dict[int, RunningRequest] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(NO_CALL, self._doors)

    def take(self, payload: bytes) -> None:
        call_id, message = calls.decode_to_app(payload)
        call = self._calls.get(call_id)
        if call is not None:
            call.take(message)
        elif isinstance(message, Serve):
            call = RunningRequest(
                message, partial(self.send, call_id), partial(self._forget, call_id)
            )
            self._calls[call_id] = call
            self._record.num_running += 1
            call.task = self.loop.create_task(call.run(self._app))
            call.task.add_done_callback(self._count_down)

    def _count_down(self, task: asyncio.Task[None]) -> None:
        self._record.num_running -= 1

    def _forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    def send(self, call_id: int, message: calls.ToFrontEnd) -> None:
        try:
            self.write(frame(sockets.encode((call_id, message))))
        except FrameTooLarge as error:
            raise UserCodeFailed(str(error)) from None

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for call in list(self._calls.values()):
            call.lose()


async def beat(record: EngineRecord) -> None:
    """Write into the record, again and again, that the loop turns: each turn is a step."""
    while True:
        now_s = time.monotonic()
        record.beat_s = now_s
        record.step_s = now_s
        record.step += 1
        follow(record.block.supervisor.log_level)
        await asyncio.sleep(BEAT_S)


async def serve(app: ASGIApp, doors: Doors, record: EngineRecord, socket_path: str) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in ENDING:
        loop.add_signal_handler(signum, stop.set)

    server = await listen(lambda: AppEnd(app, doors, record), socket_path)
    beating = asyncio.create_task(beat(record))
    record.phase = Phase.READY
    await stop.wait()

    record.phase = Phase.DRAINING
    server.close()
    deadline_s = time.monotonic() + FINISH_S
    while record.num_running and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)

    beating.cancel()
    # A signal that came while the loop closes would find the loop's pipe closed.
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)


def load(code: UserCodeConfig, model: ModelConfig, record: EngineRecord) -> tuple[ASGIApp, Doors]:
    """Import the code, and return the app with it. Raises ModelUnusable with what it raised, and
    the line.
    """
    record.stage = "import"
    for entry in (model.path, code.standards_folder):
        if entry not in sys.path:
            sys.path.insert(0, entry)

    if find_spec("vllm") is None:
        sys.path.append(str(COMPAT))

    os.chdir(model.path)
    try:
        import_early(Path(code.path))
        return build(code.path, code.standards_folder, model_folder=model.path, name=model.name)
    except BaseException as error:
        raise unusable(code.path, error) from error


def import_early(file: Path) -> None:
    """Import what the file wants of vLLM, also inside of a function. It takes longer than requests
    may wait, and in AWS's image it is there before them.
    """
    for module, names in imported_from(file, "vllm"):
        # The code itself meets the error, and may live with it.
        with suppress(Exception):
            imported = import_module(module)
            for name in names:
                getattr(imported, name)


def run(slot: int) -> int:
    """Load, serve, stop. Returns the exit code."""
    runtime = Runtime.from_environ()
    socket, record = sockets.ends(runtime.path, runtime.attach())[slot]
    code = runtime.config.user_code
    server = runtime.config.server
    assert code is not None

    # lmi's own sessions lie beside these, and each removes what it does not know.
    os.environ[SESSIONS] = str(runtime.sessions_path / "of-code")

    def live() -> None:
        app, doors = load(code, runtime.config.model, record)
        record.stage = ""
        linux.keep_to_cores()
        asyncio.run(serve(app, doors, record, socket))

    return slot_process.live(record, f"code {slot}", server.log_level, server.log_format, live)


if __name__ == "__main__":
    slot_process.main("lmi.user_code.standards.worker", __doc__, run)
