"""gunicorn's settings for the front end, which its master reads: every lower-case name that gunicorn knows is one.

A front end ends at once when the supervisor is gone, and drains when only its master is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from typing import Any

from gunicorn import util  # type: ignore[import-untyped]
from gunicorn.arbiter import Arbiter  # type: ignore[import-untyped]
from gunicorn.config import Config  # type: ignore[import-untyped]
from gunicorn.glogging import Logger  # type: ignore[import-untyped]

import lmi.server.app  # noqa: F401  # before the fork, so that all workers share its code
import lmi.shared.log
from lmi.http.protocol import GuardedProtocol, Refusal
from lmi.http.worker import BEAT_S, LAST_S, GuardedWorker
from lmi.runtime import ServerRuntime
from lmi.server.front_end import describe, explain
from lmi.shared import linux
from lmi.shared.cores import keep as keep_to_cores
from lmi.shared.sink import guard_streams
from lmi.shared.state import FrontEndRecord, Phase
from lmi.supervisor.restarts import FIRST_DELAY_S, LONGEST_DELAY_S, drain_notice_s

util._setproctitle = lambda title: None  # it would replace our names where setproctitle is installed, as with vLLM

SILENT_S = 15.0  # a record without a beat for this long is free

log = logging.getLogger(__name__)

_runtime = ServerRuntime.from_environ()
_block = _runtime.attach()
_server = _runtime.config
_supervisor_pid = int(os.environ[linux.SUPERVISOR_PID])
_finish_s = max(0.5, _server.drain_timeout_s - drain_notice_s(_server.drain_timeout_s))


def set_up_log(role: str) -> None:
    """Give every line one form. Lines of gunicorn and uvicorn about their starts and stops appear only with DEBUG."""
    lmi.shared.log.setup(role, _server.log_level, _server.log_format)
    if _server.log_level.upper() != "DEBUG":
        for name in ("gunicorn.error", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("gunicorn.error").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """False for gunicorn's lines about a front end that cannot start. The supervisor logs that, with the reason."""
    if record.msg == "Worker (pid:%s) exited with code %s." and isinstance(record.args, tuple):
        return record.args[1] not in (Arbiter.WORKER_BOOT_ERROR, Arbiter.APP_LOAD_ERROR)
    return record.msg not in ("Shutting down: %s", "Reason: %s")


class Log(Logger):  # type: ignore[misc]
    """gunicorn's logger, with the line format of lmi."""

    def setup(self, cfg: Config) -> None:
        guard_streams()
        set_up_log("gunicorn")
        lmi.shared.log.count_dropped_in(_block.supervisor, "num_log_lines_dropped_by_master")


class FrontEndProtocol(GuardedProtocol):
    header_timeout_s = _server.header_timeout_s
    body_timeout_s = _server.body_timeout_s
    stall_timeout_s = _server.stall_timeout_s

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if _block.supervisor.phase == Phase.DRAINING and self.cycle is not None:
            self.cycle.keep_alive = False

    def note_refusal(self, refusal: Refusal) -> None:
        super().note_refusal(refusal)
        _block.frontends[int(os.environ["LMI_SLOT"])].num_requests.add(str(refusal.status))


class FrontEndWorker(GuardedWorker):
    """One front end, which keeps a record."""

    CONFIG_KWARGS = GuardedWorker.CONFIG_KWARGS | {
        "http": FrontEndProtocol,
        "lifespan": "on",
        "timeout_graceful_shutdown": _finish_s + LAST_S,
        "ssl_certfile": _server.ssl_certfile,
        "ssl_keyfile": _server.ssl_keyfile,
        "ssl_ciphers": "",  # Python's
    }
    slot: int
    record: FrontEndRecord

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draining_since_s = 0.0

    def load_wsgi(self) -> None:
        """Load the application. While the server starts, a model that the front end cannot use ends it with one line.

        After the server was ready, this process tries again while the engines and the other front ends run on, because
        a missing model may come back, as a lost mount does.
        """
        delay_s = FIRST_DELAY_S
        while True:
            try:
                super().load_wsgi()
            except Exception as error:
                if _block.supervisor.phase == Phase.LOADING:
                    sys.exit(explain(_runtime, error))
                log.error("the front end cannot start: %s; next try in %g s", describe(error), delay_s)
            else:
                return
            until_s = time.monotonic() + delay_s
            while (left_s := until_s - time.monotonic()) > 0:
                self.notify()
                time.sleep(min(BEAT_S, left_s))
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def failed_start_code(self) -> int:
        return super().failed_start_code() if _block.supervisor.phase == Phase.LOADING else 1

    def on_beat(self, now: float, lag_s: float, num_connections: int) -> None:
        self.record.beat_s = now
        lmi.shared.log.follow(_block.supervisor.log_level)
        self.record.loop_lag_s = lag_s
        self.record.num_open_connections = num_connections

    def end_requests(self) -> None:
        self.wsgi.end_requests()

    def is_told_to_stop(self, now: float) -> bool:
        """Whether the master is gone or the supervisor drains. A TERM reports that too, but an early one is lost."""
        if os.getppid() not in (self.ppid, _supervisor_pid):
            os._exit(0)  # the supervisor is gone, and with it the container
        if _block.supervisor.phase != Phase.DRAINING:
            self._draining_since_s = now
        return super().is_told_to_stop(now) or now - self._draining_since_s > 2 * BEAT_S


def begin(server: Arbiter) -> None:
    linux.set_title("lmi-gunicorn")
    keep_to_cores()


def take_slot(server: Arbiter, worker: FrontEndWorker) -> None:
    """Give the worker the lowest slot that no live worker of any master has. Runs in the master, before the fork."""
    mine = {other.slot for other in server.WORKERS.values()}
    free = [i for i, record in enumerate(_block.frontends) if i not in mine and not _is_in_use(record)]
    if not free:  # masters died faster than the streams of their workers ended
        oldest = min(set(range(len(_block.frontends))) - mine, key=lambda i: _block.frontends[i].beat_s)
        linux.send(_block.frontends[oldest].pid, signal.SIGKILL)
        free = [oldest]
    worker.slot = free[0]
    gc.freeze()  # a collection in the worker would write to every object, and so copy the pages that both share


def _is_in_use(record: FrontEndRecord) -> bool:
    return record.pid != 0 and linux.is_alive(record.pid) and time.monotonic() - record.beat_s < SILENT_S


def settle(server: Arbiter, worker: FrontEndWorker) -> None:
    """Set the new worker's record, title and parent-death signal. Runs in the worker."""
    linux.die_with_parent(server.pid, signal.SIGTERM)
    linux.set_title(f"lmi-front-{worker.slot}")
    set_up_log(f"front end {worker.slot}")
    worker.record = _block.frontends[worker.slot]
    worker.record.claim()
    lmi.shared.log.count_dropped_in(worker.record)
    worker.record.num_starts += 1
    if sum(record.num_starts for record in _block.frontends) > workers:  # the successor of a master takes other slots
        log.info("front end %d starts again as process %d", worker.slot, os.getpid())
    os.environ["LMI_SLOT"] = str(worker.slot)


def leave_slot(server: Arbiter, worker: FrontEndWorker) -> None:
    """Free the slot of a worker that has ended. Runs in the master."""
    record = _block.frontends[worker.slot]
    if record.pid == worker.pid:
        record.release()


workers = _server.frontend_workers
worker_class = FrontEndWorker
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a beat on an overlay disk can stall
timeout = 10  # seconds without a beat
graceful_timeout = int(_finish_s + LAST_S) + 2  # must exceed uvicorn's own
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
