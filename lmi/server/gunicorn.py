"""gunicorn's settings and the front-end worker; `gunicorn -c python:lmi.server.gunicorn` reads this module.

Imported in the gunicorn master only, which finds the runtime folder in its environment. Every lower-case name that
gunicorn knows is a setting. A worker beats once a second until its process ends, also while it drains, because gunicorn
kills a silent one; it ends at once when the supervisor is gone, and drains when only its master is.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import sys
import time
from typing import Any

from gunicorn import util  # type: ignore[import-untyped]
from gunicorn.arbiter import Arbiter  # type: ignore[import-untyped]
from gunicorn.config import Config  # type: ignore[import-untyped]
from gunicorn.glogging import Logger  # type: ignore[import-untyped]
from gunicorn.workers.workertmp import WorkerTmp  # type: ignore[import-untyped]
from uvicorn.server import Server
from uvicorn_worker import UvicornWorker  # type: ignore[import-untyped]

import lmi.shared.log
from lmi.errors import StartError
from lmi.http.protocol import GuardedProtocol, Refusal
from lmi.runtime import Runtime
from lmi.shared import processes
from lmi.shared.pauses import Pauses
from lmi.shared.sink import guard_streams
from lmi.shared.state import FrontEndRecord, Phase
from lmi.supervisor.restarts import FIRST_DELAY_S, LONGEST_DELAY_S, drain_notice_s

util._setproctitle = lambda title: None  # it would write over our names where setproctitle is there, as beside vLLM

BEAT_S = 1.0
RESERVED_FDS = 40  # of a worker, for everything that is no client
LATE_S = 3.0  # of the master, which looks at its workers once a second: it did not run meanwhile
SILENT_S = 15.0  # a record without a beat for so long belongs to nobody

log = logging.getLogger(__name__)

_runtime = Runtime.from_environ()
_block = _runtime.attach()
_server = _runtime.config.server
_supervisor_pid = int(os.environ["LMI_SUPERVISOR_PID"])
_finish_s = max(0.5, _server.drain_timeout_s - drain_notice_s(_server.drain_timeout_s))


def set_up_log(role: str) -> None:
    """One form for all; what gunicorn and uvicorn say about their own life interests only who debugs it."""
    lmi.shared.log.setup(role, _server.log_level, _server.log_format)
    if _server.log_level.upper() != "DEBUG":
        for name in ("gunicorn.error", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("gunicorn.error").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Not what gunicorn says when a front end cannot start: the supervisor says it, with the reason."""
    if record.msg == "Worker (pid:%s) exited with code %s." and isinstance(record.args, tuple):
        return record.args[1] not in (Arbiter.WORKER_BOOT_ERROR, Arbiter.APP_LOAD_ERROR)
    return record.msg not in ("Shutting down: %s", "Reason: %s")


class Log(Logger):  # type: ignore[misc]
    """gunicorn's logger, which would else write in a form of its own."""

    def setup(self, cfg: Config) -> None:
        guard_streams()
        set_up_log("gunicorn")
        lmi.shared.log.count_dropped_in(_block.supervisor, "num_log_lines_dropped_by_master")


class FrontEndProtocol(GuardedProtocol):
    header_timeout_s = _server.header_timeout_s
    body_timeout_s = _server.body_timeout_s
    stall_timeout_s = _server.stall_timeout_s
    max_connections = max(1, min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FDS))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if _block.supervisor.phase == Phase.DRAINING and self.cycle is not None:
            self.cycle.keep_alive = False

    def note_refusal(self, refusal: Refusal) -> None:
        super().note_refusal(refusal)
        _block.frontends[int(os.environ["LMI_SLOT"])].num_requests.add(str(refusal.status))


class Beat(WorkerTmp):  # type: ignore[misc]
    """A worker's last sign of life as the master sees it: while the master itself did not run, no time went by."""

    pauses = Pauses(LATE_S)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.pauses.note(time.monotonic())

    def last_update(self) -> float:
        now = time.monotonic()
        self.pauses.note(now)
        return now - self.pauses.ran_s(super().last_update(), now)


class FrontEndWorker(UvicornWorker):  # type: ignore[misc]
    """One front-end process: uvicorn with the guarded protocol, and a beat of its own."""

    CONFIG_KWARGS = {
        "loop": "uvloop",
        "http": FrontEndProtocol,
        "ws": "none",
        "lifespan": "on",
        "server_header": False,
        "proxy_headers": False,
        "access_log": False,
        "timeout_graceful_shutdown": _finish_s,
    }
    slot: int
    record: FrontEndRecord
    tmp: WorkerTmp
    _draining_since_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tmp.close()
        self.tmp = Beat(self.cfg)

    def load_wsgi(self) -> None:
        """A model that the front end cannot use ends the server with one line, like one that the engine cannot use.

        Not once the server was ready: a model that is gone by then may come back, as a lost mount does. So this process
        tries again, while the engines and the other front ends go on.
        """
        delay_s = FIRST_DELAY_S
        while (error := self._load()) is not None:
            if _block.supervisor.phase == Phase.LOADING:
                sys.exit(explain(error))
            log.error("the front end cannot start: %s; next try in %g s", describe(error), delay_s)
            self._wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _load(self) -> Exception | None:
        try:
            super().load_wsgi()
        except Exception as error:
            return error
        return None

    def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self.notify()
            time.sleep(min(BEAT_S, left_s))

    async def _serve(self) -> None:
        faulthandler.enable()  # gunicorn aborts a worker whose loop is blocked: then the stacks say where
        self.config.app = self.wsgi
        server = Server(config=self.config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, os._exit, 0)
        beat = asyncio.create_task(self._beat(server))
        try:
            await server.serve(sockets=self.sockets)
        finally:
            beat.cancel()
        if not server.started:
            sys.exit(Arbiter.WORKER_BOOT_ERROR if _block.supervisor.phase == Phase.LOADING else 1)

    async def _beat(self, server: Server) -> None:
        master_pid = os.getppid() if os.getppid() != _supervisor_pid else self.ppid
        due_s = time.monotonic()
        while True:
            now = time.monotonic()
            self.notify()
            self.record.beat_s = now
            self.record.loop_lag_s = now - due_s
            self.record.num_open_connections = len(server.server_state.connections)
            if os.getppid() not in (master_pid, _supervisor_pid):
                os._exit(0)  # nobody is left to answer for
            if os.getppid() != master_pid or self._is_told_to_stop(now):
                server.should_exit = True
            due_s = now + BEAT_S
            await asyncio.sleep(BEAT_S)

    def _is_told_to_stop(self, now: float) -> bool:
        """The supervisor drains. Its TERM says so too, but one that comes while a worker boots is lost."""
        if _block.supervisor.phase != Phase.DRAINING:
            self._draining_since_s = now
        return now - self._draining_since_s > 2 * BEAT_S


def explain(error: Exception) -> int:
    """Leave the supervisor the reason why this front end cannot start; returns the exit code."""
    if not isinstance(error, StartError):
        log.error("the front end failed as it started", exc_info=error)
    try:
        _runtime.front_end_failure().write_text(describe(error))
    except OSError:  # a full disk
        log.error("the front end cannot start: %s", describe(error))
    code: int = Arbiter.APP_LOAD_ERROR if isinstance(error, StartError) else Arbiter.WORKER_BOOT_ERROR
    return code


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"


def begin(server: Arbiter) -> None:
    processes.set_title("lmi-gunicorn")


def take_slot(server: Arbiter, worker: FrontEndWorker) -> None:
    """In the master, before the fork: the lowest slot that no live worker has, of this master or of one that died."""
    mine = {other.slot for other in server.WORKERS.values()}
    free = [i for i, record in enumerate(_block.frontends) if i not in mine and not _is_in_use(record)]
    if not free:  # masters died faster than their workers' streams ended
        oldest = min(set(range(len(_block.frontends))) - mine, key=lambda i: _block.frontends[i].beat_s)
        processes.send(_block.frontends[oldest].pid, signal.SIGKILL)
        free = [oldest]
    worker.slot = free[0]


def _is_in_use(record: FrontEndRecord) -> bool:
    return record.pid != 0 and processes.is_alive(record.pid) and time.monotonic() - record.beat_s < SILENT_S


def settle(server: Arbiter, worker: FrontEndWorker) -> None:
    """In the new worker: its record, its name, and the signal that it gets when the master dies."""
    processes.die_with_parent(server.pid, signal.SIGTERM)
    processes.set_title(f"lmi-front-{worker.slot}")
    set_up_log(f"front end {worker.slot}")
    worker.record = _block.frontends[worker.slot]
    worker.record.claim()
    lmi.shared.log.count_dropped_in(worker.record)
    worker.record.num_starts += 1
    if sum(record.num_starts for record in _block.frontends) > workers:  # a master's successor takes other slots
        log.info("front end %d starts again as process %d", worker.slot, os.getpid())
    os.environ["LMI_SLOT"] = str(worker.slot)


def leave_slot(server: Arbiter, worker: FrontEndWorker) -> None:
    """In the master, after a worker has ended."""
    record = _block.frontends[worker.slot]
    if record.pid == worker.pid:
        record.release()


workers = _server.frontend_workers
worker_class = FrontEndWorker
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a beat on an overlay disk can stall
timeout = 10  # seconds without a beat
graceful_timeout = int(_finish_s) + 2  # must exceed uvicorn's own
keepalive = 120  # longer than a proxy keeps an idle connection
backlog = 2048
control_socket_disable = True
preload_app = False
max_requests = 0
forwarded_allow_ips = ""
accesslog = None
logger_class = Log
on_starting = begin
pre_fork = take_slot
post_fork = settle
child_exit = leave_slot
