"""A gunicorn worker that serves an ASGI application with the guarded protocol.

A subclass sets other limits with its own protocol in `CONFIG_KWARGS`. A worker beats once a second until its process
ends, also while it drains, because gunicorn kills a silent worker.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from gunicorn.arbiter import Arbiter  # type: ignore[import-untyped]
from gunicorn.config import Config as GunicornConfig  # type: ignore[import-untyped]
from gunicorn.workers.workertmp import WorkerTmp  # type: ignore[import-untyped]
from uvicorn.config import Config
from uvicorn.server import Server
from uvicorn_worker import UvicornWorker  # type: ignore[import-untyped]

from lmi.http.protocol import GuardedProtocol
from lmi.shared.pauses import Pauses

BEAT_S = 1.0
LAST_S = 1.0  # from the end of an application's open requests to the moment when uvicorn cancels those that go on
LATE_S = 3.0  # the master checks its workers once a second; in a gap of this length it did not run


class Beat(WorkerTmp):  # type: ignore[misc]
    """A worker's last sign of life as the master sees it. Time in which the master did not run does not count."""

    pauses = Pauses(LATE_S)

    def __init__(self, cfg: GunicornConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(cfg)
        self._clock = clock
        self.pauses.note(clock())

    def last_update(self) -> float:
        now = self._clock()
        self.pauses.note(now)
        return now - self.pauses.ran_s(super().last_update(), now)


class DrainingServer(Server):
    """Lets an application end its open requests before it cancels them."""

    def __init__(self, config: Config, end_requests: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit_s = self.config.timeout_graceful_shutdown
        if limit_s is not None:
            asyncio.get_running_loop().call_later(limit_s - LAST_S, self._end_requests)
        await super().shutdown(sockets)


class GuardedWorker(UvicornWorker):  # type: ignore[misc]
    """One process that serves an application."""

    CONFIG_KWARGS = {
        "loop": "uvloop",
        "http": GuardedProtocol,
        "ws": "none",
        "server_header": False,
        "proxy_headers": False,
        "access_log": False,
    }
    tmp: WorkerTmp
    ppid: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tmp.close()
        self.tmp = Beat(self.cfg)

    def on_beat(self, now: float, lag_s: float, num_connections: int) -> None:
        """Called once a second. `lag_s` is its delay."""

    def is_told_to_stop(self, now: float) -> bool:
        """Whether to finish open requests and end, even without a signal. Called once a second."""
        return os.getppid() != self.ppid

    def end_requests(self) -> None:
        """End the requests that are open late in a drain. Called `LAST_S` before uvicorn cancels them."""

    def failed_start_code(self) -> int:
        """Return the exit code for an application that did not start. This code ends the master too."""
        code: int = Arbiter.WORKER_BOOT_ERROR
        return code

    async def _serve(self) -> None:
        faulthandler.enable()  # gunicorn aborts a worker with a blocked loop; the stacks show where
        self.config.app = self.wsgi
        server = DrainingServer(self.config, self.end_requests)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, os._exit, 0)
        beat = asyncio.create_task(self._beat(server))
        try:
            await server.serve(sockets=self.sockets)
        finally:
            beat.cancel()
        if not server.started:
            sys.exit(self.failed_start_code())

    async def _beat(self, server: Server) -> None:
        due_s = time.monotonic()
        while True:
            now = time.monotonic()
            self.notify()
            self.on_beat(now, now - due_s, len(server.server_state.connections))
            if self.is_told_to_stop(now):
                server.should_exit = True
            due_s = now + BEAT_S
            await asyncio.sleep(BEAT_S)
