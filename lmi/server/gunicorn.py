"""gunicorn's worker, the front end, and its settings, which are the lower-case names here that
gunicorn knows.

A front end ends at once when the supervisor is gone, and drains when only its master is gone.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from gunicorn import util  # type: ignore[import-untyped]
from gunicorn.arbiter import Arbiter  # type: ignore[import-untyped]
from gunicorn.config import Config  # type: ignore[import-untyped]
from gunicorn.glogging import Logger  # type: ignore[import-untyped]
from gunicorn.workers.workertmp import WorkerTmp  # type: ignore[import-untyped]
from uvicorn.server import Server
from uvicorn_worker import UvicornWorker  # type: ignore[import-untyped]

# It is imported before the fork, so that all workers share its code.
import lmi.server.app
import lmi.shared.log
from lmi.http.protocol import GuardedProtocol
from lmi.http.refusals import Refusal
from lmi.runtime import ServerRuntime
from lmi.server.front_end import describe, explain
from lmi.shared import linux, processes, signals
from lmi.shared.sink import guard_streams
from lmi.shared.state import FrontEndRecord, Phase
from lmi.supervisor.pauses import Pauses
from lmi.supervisor.restarts import FIRST_DELAY_S, LONGEST_DELAY_S, drain_notice_s

# setproctitle, which vLLM installs, would replace our names of processes.
util._setproctitle = lambda title: None

BEAT_S = 1.0
# From the end of an application's open requests to the moment when uvicorn cancels those that go
# on.
LAST_S = 1.0
# However short the drain is, requests have this long to end by themselves.
MIN_FINISH_S = 0.5
# The master checks its workers once a second. In a gap of this length it did not run.
LATE_S = 3.0
# A record without a beat for this long is free.
SILENT_S = 15.0
# The variable that tells a worker its slot.
SLOT = "LMI_SLOT"

log = logging.getLogger(__name__)

_runtime = ServerRuntime.from_environ()
_block = _runtime.attach()
_server = _runtime.config
_supervisor_pid = int(os.environ[linux.SUPERVISOR_PID])
_finish_s = max(MIN_FINISH_S, _server.drain_timeout_s - drain_notice_s(_server.drain_timeout_s))


def set_up_log(role: str) -> None:
    """Give every line one form. Lines of gunicorn and uvicorn about their starts and stops appear
    only with DEBUG.
    """
    lmi.shared.log.setup(role, _server.log_level, _server.log_format)
    if _server.log_level.upper() != "DEBUG":
        for name in ("gunicorn.error", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.WARNING)

        logging.getLogger("gunicorn.error").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """False for gunicorn's lines about a front end that cannot start. The supervisor logs that,
    with the reason.
    """
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
    max_message_bytes = _server.max_request_size
    max_partial_bytes = _server.max_body_memory

    def websocket_at(self, path: str) -> type[Any] | None:
        return lmi.server.app.websocket_at(path)

    def is_leaving(self) -> bool:
        return _block.supervisor.phase in (Phase.LEAVING, Phase.DRAINING)

    def note_refusal(self, refusal: Refusal) -> None:
        super().note_refusal(refusal)
        _block.frontends[int(os.environ[SLOT])].num_requests.add(str(refusal.status))


class Beat(WorkerTmp):  # type: ignore[misc]
    """A worker's last sign of life as the master sees it. Time in which the master did not run does
    not count.
    """

    pauses = Pauses(LATE_S)

    def __init__(self, cfg: Config, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(cfg)
        self._clock = clock
        self.pauses.note(clock())

    def last_update(self) -> float:
        now = self._clock()
        self.pauses.note(now)
        return now - self.pauses.ran_s(super().last_update(), now)


class FrontEndServer(Server):
    """Lets the application end its open requests before it cancels them."""

    def stop_accepting(self) -> None:
        """Leave the port to another process. The connections that are here go on."""
        if not self.started:
            return

        for server in self.servers:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: Any = self.config.app
        app.leave()
        asyncio.get_running_loop().call_later(_finish_s, app.end_requests)
        await super().shutdown(sockets)


class FrontEndWorker(UvicornWorker):  # type: ignore[misc]
    """One front end, which keeps a record, and beats also while it drains, because gunicorn kills a
    silent worker.
    """

    CONFIG_KWARGS = {
        "loop": "uvloop",
        "http": FrontEndProtocol,
        "ws": "none",
        "lifespan": "on",
        "server_header": False,
        "proxy_headers": False,
        "access_log": False,
        "timeout_graceful_shutdown": _finish_s + LAST_S,
        "ssl_context_factory": lmi.server.app.tls_context if _server.ssl_certfile else None,
    }
    tmp: WorkerTmp
    slot: int
    record: FrontEndRecord

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tmp.close()
        self.tmp = Beat(self.cfg)

    def init_signals(self) -> None:
        super().init_signals()
        signals.ignore_strays()

    def load_wsgi(self) -> None:
        """Load the application. While the server starts, a model that the front end cannot use ends
        it with one line.

        After the server was ready, this process tries again while the engines and the other front
        ends run on, because a missing model may come back, as a lost mount does.
        """
        delay_s = FIRST_DELAY_S
        while True:
            try:
                super().load_wsgi()
            except Exception as error:
                if _block.supervisor.phase == Phase.LOADING:
                    sys.exit(explain(_runtime, error))

                log.error(
                    "the front end cannot start: %s; next try in %g s", describe(error), delay_s
                )
            else:
                return

            until_s = time.monotonic() + delay_s
            wait_s = delay_s
            while wait_s > 0:
                self.notify()
                time.sleep(min(BEAT_S, wait_s))
                wait_s = until_s - time.monotonic()

            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _serve(self) -> None:
        # gunicorn aborts a worker with a blocked loop, and the stacks show where.
        faulthandler.enable()
        self.config.app = self.wsgi
        server = FrontEndServer(self.config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, os._exit, 0)
        beat = asyncio.create_task(self._beat(server))
        try:
            await server.serve(sockets=self.sockets)
        finally:
            beat.cancel()

        if not server.started:
            # WORKER_BOOT_ERROR ends the master too.
            is_loading = _block.supervisor.phase == Phase.LOADING
            sys.exit(Arbiter.WORKER_BOOT_ERROR if is_loading else 1)

    async def _beat(self, server: FrontEndServer) -> None:
        """Report once a second. End in order when the master is gone or the supervisor drains.

        A TERM reports a drain too, but an early one is lost.
        """
        due_s = time.monotonic()
        # A worker that begins while the supervisor drains ends at its first beat.
        not_draining_s = 0.0
        while True:
            now = time.monotonic()
            self._report(server, now, lag_s=now - due_s)

            parent = os.getppid()
            if parent not in (self.ppid, _supervisor_pid):
                # The supervisor is gone, and with it the container.
                os._exit(0)

            if _block.supervisor.heir:
                server.stop_accepting()

            if _block.supervisor.phase != Phase.DRAINING:
                not_draining_s = now

            if parent != self.ppid or now - not_draining_s > 2 * BEAT_S:
                server.should_exit = True

            due_s = now + BEAT_S
            await asyncio.sleep(BEAT_S)

    def _report(self, server: FrontEndServer, now: float, *, lag_s: float) -> None:
        """Tell the master and the supervisor that this worker lives, and take its log level."""
        self.notify()
        self.record.beat_s = now
        self.record.loop_lag_s = lag_s
        self.record.num_open_connections = len(server.server_state.connections)
        lmi.shared.log.follow(_block.supervisor.log_level)


def on_starting(server: Arbiter) -> None:
    linux.set_title("lmi-gunicorn")
    linux.keep_to_cores()


def when_ready(server: Arbiter) -> None:
    """Ignore what gunicorn takes for a wish to reload, to start anew or to change the number of its
    workers.

    A reload would cut the streams of the workers that it replaces.
    """
    signals.ignore_strays()


def pre_fork(server: Arbiter, worker: FrontEndWorker) -> None:
    """Give the worker the lowest slot that no live worker of any master has. Runs in the master."""
    num_slots = len(_block.frontends)
    slots = set(range(num_slots)) - {live.slot for live in server.WORKERS.values()}
    free_slots = [slot for slot in slots if not _is_in_use(_block.frontends[slot])]
    if not free_slots:
        # Masters died faster than the streams of their workers ended.
        silent_slot = min(slots, key=lambda slot: _block.frontends[slot].beat_s)
        processes.send(_block.frontends[silent_slot].pid, signal.SIGKILL)
        free_slots = [silent_slot]

    worker.slot = min(free_slots)
    # A collection in the worker would write to every object, and so copy the pages that both share.
    gc.freeze()


def _is_in_use(record: FrontEndRecord) -> bool:
    if record.pid == 0 or not processes.is_alive(record.pid):
        return False

    return time.monotonic() - record.beat_s < SILENT_S


def post_fork(server: Arbiter, worker: FrontEndWorker) -> None:
    """Set the new worker's record, title and parent-death signal. Runs in the worker."""
    linux.die_with_parent(server.pid, signal.SIGTERM)
    linux.set_title(f"lmi-front-{worker.slot}")
    set_up_log(f"front end {worker.slot}")
    worker.record = _block.frontends[worker.slot]
    worker.record.claim()
    lmi.shared.log.count_dropped_in(worker.record)
    worker.record.num_starts += 1

    # The starts of all slots count, because the successor of a master takes other slots.
    num_starts = sum(record.num_starts for record in _block.frontends)
    if num_starts > workers:
        log.info("front end %d starts again as process %d", worker.slot, os.getpid())

    os.environ[SLOT] = str(worker.slot)


def child_exit(server: Arbiter, worker: FrontEndWorker) -> None:
    """Free the slot of a worker that has ended. Runs in the master."""
    record = _block.frontends[worker.slot]
    if record.pid == worker.pid:
        record.release()


workers = _server.frontend_workers
worker_class = FrontEndWorker
# A beat on an overlay disk can stall.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
timeout = 10  # seconds without a beat
# It must exceed uvicorn's own.
graceful_timeout = int(_finish_s + LAST_S) + 2
# It is longer than a proxy keeps an idle connection.
keepalive = 120
control_socket_disable = True
forwarded_allow_ips = ""
logger_class = Log
