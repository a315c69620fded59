"""The supervisor: starts engines and front ends, restarts what dies, stops everything in order.

It is the container's main process and stays small so that it never fails: no threads, no event loop, one loop over
signals, deaths and the clock. It binds the port first and passes it on, so a front end can die without the port
closing, and engines are never children of the front end. What it knows of an engine it reads from the shared block.
The rules of restarting and hanging are in `restarts.py`, what is printed for people in `banner.py`.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from lmi.engine.worker import read_report
from lmi.errors import BadConfiguration, ModelUnusable, SecurityRefused, StartError
from lmi.runtime import ENVIRONMENT_NAME, Runtime
from lmi.settings.config import Config
from lmi.shared import processes
from lmi.shared.log import count_dropped_in
from lmi.shared.pauses import Pauses
from lmi.shared.state import Block, EngineRecord, Phase
from lmi.supervisor import environment
from lmi.supervisor.banner import Failure, clear_bar, say_failed, say_ready
from lmi.supervisor.listener import bind
from lmi.supervisor.restarts import (
    DRAIN_CUT_S,
    DRAIN_END_S,
    LATE_TURN_S,
    RestartTable,
    code_hang,
    drain_notice_s,
    hang,
)

APP = "lmi.server.app:create_app()"
SUPERVISOR_PID = "LMI_SUPERVISOR_PID"
TICK_S = 0.2
STACKS_S = 0.5  # for a hung engine to write its stacks before it is killed
FAILED_NOTICE_S = 2.0  # `/ping` says 500 this long before the container ends
STOP_S = 0.5  # for each stage of an end at once: engines, what clients are told, front ends
STRAYS_S = 0.3  # for a library's process that tidies up after an engine, and ends by itself when that is gone
MAX_FRONT_END_DEATHS = 10
MIN_OPEN_FILES = 64  # a front end keeps 40 for itself, the others are for clients
FATAL_ENGINE_CODES = {error.exit_code: error.label for error in (BadConfiguration, ModelUnusable, SecurityRefused)}
FRONT_END_CANNOT_BOOT, FRONT_END_CANNOT_LOAD = 3, 4  # exit codes of gunicorn
ENGINE_OOM_SCORE, FRONT_END_OOM_SCORE, OWN_OOM_SCORE = 500, 0, -500

log = logging.getLogger(__name__)


class Resolved(Protocol):
    @property
    def config(self) -> Config: ...


@dataclass
class Engine:
    """One engine slot and the process in it, if there is one. `is_code`: it runs code of the model's own."""

    slot: int
    record: EngineRecord
    table: RestartTable
    pid: int | None = None
    spawned_s: float = 0.0
    start_s: float = 0.0  # when to start the next process
    kill_s: float | None = None  # when to kill a hung one
    hung: str | None = None
    was_ready: bool = False  # the process was, at some time
    is_code: bool = False

    @property
    def name(self) -> str:
        return f"{'code worker' if self.is_code else 'engine'} {self.slot}"


@dataclass
class FrontEnd:
    """The gunicorn master."""

    table: RestartTable = field(default_factory=lambda: RestartTable(MAX_FRONT_END_DEATHS, 600.0, first_delay_s=0.05))
    pid: int | None = None
    spawned_s: float = 0.0
    start_s: float = 0.0


class Supervisor:
    def __init__(self, config: Config, app: str = APP) -> None:
        self._config = config
        self._app = app
        self._exit_code: int | None = None
        self._failure: Failure | None = None
        self._end_s: float | None = None  # when a failed server ends
        self._drain_s: float | None = None  # when draining began
        self._is_announced = False
        self._started_s = time.monotonic()
        self._pauses = Pauses(LATE_TURN_S)

    def run(self) -> int:
        """Serve until told to stop; returns the exit code. Raises StartError before anything is started."""
        _raise_file_limit()
        self._listener: socket.socket | None = bind(self._config.server.host, self._config.server.port)
        _be_supervisor()
        self._signals = processes.Signals()
        self._runtime = Runtime.create(self._config)
        try:
            self._begin(self._runtime.attach())
            while self._exit_code is None:
                self._turn()
        finally:
            self._stop_all()
            self._runtime.remove()
            if not self._is_announced:
                clear_bar()
        if self._failure is not None:
            say_failed(self._failure, self._config.server.log_format)
        return self._exit_code

    def _begin(self, block: Block) -> None:
        self._block = block
        block.supervisor.claim()
        count_dropped_in(block.supervisor)
        block.supervisor.phase = Phase.LOADING
        engine = self._config.engine
        self._front_end = FrontEnd()
        self._engines = [
            Engine(slot, record, RestartTable(engine.retry_threshold, engine.retry_window_s), is_code=is_code)
            for records, is_code in ((block.engines, self._config.is_user_code), (block.formatters, True))
            for slot, record in enumerate(records)
        ]

    def _turn(self) -> None:
        for signum in self._signals.wait(TICK_S):
            self._on_signal(signum)
        for pid, code in processes.reap():
            self._on_exit(pid, code, time.monotonic())
        now = time.monotonic()
        if paused_s := self._pauses.note(now):
            log.info("this server was paused for %.1f s, which counts against nobody", paused_s)
        if self._end_s is not None:
            if now >= self._end_s:
                self._exit_code = self._failure.code if self._failure else 0
        elif self._drain_s is not None:
            self._drain(now)
        else:
            self._mind_front_end(now)
            for engine in self._engines:
                self._mind_engine(engine, now)
            self._announce()

    def _on_signal(self, signum: signal.Signals) -> None:
        is_hangup = signum == signal.SIGHUP and sys.stderr.isatty()
        if signum == signal.SIGTERM and self._drain_s is None and self._end_s is None:
            log.info("SIGTERM: no new requests, open ones have %g s", self._config.server.drain_timeout_s)
            self._block.supervisor.phase = Phase.DRAINING
            self._block.supervisor.reason = "the server was told to stop"
            self._drain_s = time.monotonic()
        elif signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT) or is_hangup:
            log.info("%s: stopping now", signum.name)
            self._exit_code = self._failure.code if self._failure else 128 + signum

    def _on_exit(self, pid: int, code: int, now: float) -> None:
        for engine in self._engines:
            if engine.pid == pid:
                self._on_engine_exit(engine, code, now)
                return
        if self._front_end.pid == pid:
            self._on_front_end_exit(code, now)
            return
        for record in self._block.frontends:  # a worker whose master died
            if record.pid == pid:
                record.release()

    def _mind_engine(self, engine: Engine, now: float) -> None:
        if engine.pid is None:
            if now >= engine.start_s:
                self._start_engine(engine, now)
        elif engine.kill_s is not None:
            if now >= engine.kill_s:
                processes.send(engine.pid, signal.SIGKILL, to_group=True)
        elif engine.record.phase == Phase.READY and not engine.was_ready:
            engine.was_ready = True
            if engine.record.num_starts > 1:
                log.info("%s is ready, %.1f s after its last one was lost", engine.name, now - engine.record.lost_s)
        elif why := self._hang(engine, now):
            log.error("%s %s; its stacks follow, then it is killed", engine.name, why)
            self._lose(engine, why, now)
            engine.hung, engine.kill_s = why, now + STACKS_S
            processes.send(engine.pid, signal.SIGUSR2)

    def _hang(self, engine: Engine, now: float) -> str | None:
        if engine.is_code:
            return code_hang(engine.record, self._config, engine.spawned_s, now, self._pauses)
        return hang(engine.record, self._config.engine, engine.spawned_s, now, self._pauses)

    def _start_engine(self, engine: Engine, now: float) -> None:
        engine.record.num_starts += 1
        engine.record.phase = Phase.STARTING
        engine.spawned_s, engine.kill_s, engine.hung, engine.was_ready = now, None, None, False
        own = self._environment()
        if engine.is_code:
            module, environ = "lmi.user_code.worker", environment.of_user_code(self._config, own, engine.slot)
        else:
            folder = str(self._runtime.path)
            given = environment.of_engine(self._config, os.environ, engine.slot, folder)
            module, environ = "lmi.engine.worker", own | given
        engine.pid = processes.spawn(
            [sys.executable, "-P", "-m", module, "--slot", str(engine.slot)],
            environ,
            death_signal=signal.SIGKILL,  # an engine without its supervisor is of no use to anyone
            oom_score=ENGINE_OOM_SCORE,
        )
        log.info("%s starts as process %d", engine.name, engine.pid)

    def _lose(self, engine: Engine, why: str, now: float) -> None:
        engine.record.phase = Phase.LOST
        engine.record.reason = why
        engine.record.lost_s = now

    def _on_engine_exit(self, engine: Engine, code: int, now: float) -> None:
        assert engine.pid is not None
        processes.send(engine.pid, signal.SIGKILL, to_group=True)  # ranks that it left behind
        said = engine.record.reason if code > 0 and engine.record.pid == engine.pid else ""
        why = engine.hung or said or processes.describe_exit(code)
        stage = engine.record.stage or Phase(engine.record.phase).name.lower()
        engine.pid = None
        engine.record.release()
        self._lose(engine, why, now)
        if self._drain_s is not None or self._end_s is not None:
            return
        if code in FATAL_ENGINE_CODES:
            engine.record.phase = Phase.FAILED
            self._fail(Failure(code=code, cause=FATAL_ENGINE_CODES[code], stage=stage, message=why), notice_s=0.0)
            return
        delay_s = engine.table.delay_s(engine.spawned_s, now, was_ready=engine.was_ready)
        if delay_s is None:
            engine.record.phase = Phase.FAILED
            message = f"{engine.name} died {engine.table.num_deaths} times, the last time it {why}"
            self._fail(Failure(code=1, cause="engine_lost", stage=stage, message=message), notice_s=FAILED_NOTICE_S)
            return
        self._block.supervisor.num_engine_restarts += 1
        engine.start_s = now + delay_s
        log.error("%s lost: %s; next start in %g s", engine.name, why, delay_s)

    def _mind_front_end(self, now: float) -> None:
        front_end = self._front_end
        if front_end.pid is not None or now < front_end.start_s or self._listener is None:
            return
        fd = self._listener.fileno()
        front_end.spawned_s = now
        front_end.pid = processes.spawn(
            [sys.executable, "-P", "-m", "gunicorn", "-c", "python:lmi.server.gunicorn", "-b", f"fd://{fd}", self._app],
            environment.without_secrets(self._environment()),
            death_signal=signal.SIGKILL,  # its workers notice and end by themselves
            oom_score=FRONT_END_OOM_SCORE,
            inherited_fds=[fd],
            folder=str(self._runtime.path),  # gunicorn imports from where it is started; a model folder is not trusted
        )

    def _on_front_end_exit(self, code: int, now: float) -> None:
        self._front_end.pid = None
        if self._drain_s is not None or self._end_s is not None:
            return
        if code in (FRONT_END_CANNOT_BOOT, FRONT_END_CANNOT_LOAD) and not self._is_announced:
            self._fail(self._front_end_failure(code), notice_s=0.0)
            return
        delay_s = self._front_end.table.delay_s(self._front_end.spawned_s, now)
        if delay_s is None:
            message = f"the front end ended too often, the last time it {processes.describe_exit(code)}"
            self._fail(Failure(code=1, cause="front_end_lost", stage="serve", message=message), notice_s=0.0)
            return
        self._front_end.start_s = now + delay_s
        log.error("the front end's master %s; its workers finish what they have", processes.describe_exit(code))

    def _front_end_failure(self, code: int) -> Failure:
        message = "the front end could not start, see the log above"
        with suppress(OSError):
            message = self._runtime.front_end_failure().read_text()
        is_model = code == FRONT_END_CANNOT_LOAD
        return Failure(
            code=ModelUnusable.exit_code if is_model else StartError.exit_code,
            cause=ModelUnusable.label if is_model else StartError.label,
            stage="front end",
            message=message,
        )

    def _fail(self, failure: Failure, notice_s: float) -> None:
        self._failure = failure
        self._block.supervisor.phase = Phase.FAILED
        self._block.supervisor.reason = failure.message
        self._end_s = time.monotonic() + notice_s

    def _drain(self, now: float) -> None:
        """One look at a server that is stopping: front ends first, engines when nobody needs them any more."""
        assert self._drain_s is not None
        timeout_s, since_s = self._config.server.drain_timeout_s, self._pauses.ran_s(self._drain_s, now)
        is_serving = any(engine.record.phase == Phase.READY for engine in self._engines)
        if self._listener is not None and (since_s >= drain_notice_s(timeout_s) or not is_serving):
            self._listener.close()
            self._listener = None
            self._send_front_end(signal.SIGTERM)
        if self._listener is None and (not is_serving or not self._has_front_ends()):
            self._send_engines(signal.SIGTERM)
        if since_s >= timeout_s + DRAIN_CUT_S:
            self._send_front_end(signal.SIGKILL)
        is_over = self._front_end.pid is None and not any(engine.pid for engine in self._engines)
        if is_over or since_s >= timeout_s + DRAIN_END_S:
            self._exit_code = 0

    def _has_front_ends(self) -> bool:
        """The master, or workers of a master that died."""
        workers = [record.pid for record in self._block.frontends if record.pid]
        return self._front_end.pid is not None or any(map(processes.is_alive, workers))

    def _send_engines(self, signum: signal.Signals) -> None:
        for engine in self._engines:
            if engine.pid is not None:
                processes.send(engine.pid, signum, to_group=signum == signal.SIGKILL)

    def _send_front_end(self, signum: signal.Signals) -> None:
        if self._front_end.pid is not None:
            processes.send(self._front_end.pid, signum, to_group=signum == signal.SIGKILL)

    def _stop_all(self) -> None:
        """Whatever happened: when this returns no child is left that can be killed, and clients were told what ends."""
        if self._listener is not None:
            self._listener.close()
        engines = {engine.pid for engine in self._engines if engine.pid is not None}
        self._send_engines(signal.SIGTERM)
        self._wait_while(lambda: engines & set(processes.children()))
        self._send_engines(signal.SIGKILL)
        self._wait_while(lambda: self._front_end.pid and any(front.num_in_flight for front in self._block.frontends))
        self._send_front_end(signal.SIGTERM)
        self._wait_while(lambda: self._front_end.pid in processes.children())
        self._send_front_end(signal.SIGKILL)
        killed_s = time.monotonic()
        while (pids := processes.children()) and time.monotonic() < killed_s + STRAYS_S + STOP_S:
            for pid in pids if time.monotonic() > killed_s + STRAYS_S else ():
                processes.send(pid, signal.SIGKILL)
            self._signals.wait(0.02)
            processes.reap()

    def _wait_while(self, is_so: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + STOP_S
        while is_so() and time.monotonic() < deadline_s:
            self._signals.wait(0.02)
            processes.reap()

    def _environment(self) -> dict[str, str]:
        own = {ENVIRONMENT_NAME: str(self._runtime.path), SUPERVISOR_PID: str(os.getpid())}
        return environment.of_child(os.environ) | own

    def _announce(self) -> None:
        """Once, when the first answer can be given."""
        if self._is_announced or not any(record.beat_s for record in self._block.frontends):
            return
        if not all(record.phase == Phase.READY for record in self._block.formatters):
            return
        for slot, record in enumerate(self._block.engines):
            if record.phase == Phase.READY and self._listener is not None:
                self._is_announced = True
                self._block.supervisor.phase = Phase.READY
                port: int = self._listener.getsockname()[1]
                report = read_report(self._runtime, slot)
                say_ready(self._config, port, report, time.monotonic() - self._started_s)
                return


def _be_supervisor() -> None:
    processes.set_title("lmi-supervisor")
    processes.adopt_orphans()
    processes.set_oom_score(OWN_OOM_SCORE)


def _raise_file_limit() -> None:
    """For this process and all that it starts, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_OPEN_FILES:
        raise StartError(
            f"a server needs {MIN_OPEN_FILES} open files in each process, and only {most} are allowed here "
            "(`ulimit -Hn`, RLIMIT_NOFILE)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(resolved: Resolved) -> int:
    """Serve `resolved.config`; returns the exit code. A start that fails ends with its reason on stderr."""
    try:
        return Supervisor(resolved.config).run()
    except StartError as error:
        failure = Failure(code=error.exit_code, cause=error.label, stage="start", message=str(error))
        say_failed(failure, resolved.config.server.log_format)
        return error.exit_code
