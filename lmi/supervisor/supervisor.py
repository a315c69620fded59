"""The supervisor starts engines, user code and front ends, restarts those that die, and stops all
in order.

It is the container's main process and stays small so that it never fails: it has no threads and no
asyncio, but one loop, which looks for signals, deaths and what is due. It binds the port first and
passes it on, so the port answers before there is a model and stays open when a front end dies. It
reads the states of the other processes from the shared blocks.
"""

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lmi.adapters.files import register_beside
from lmi.errors import StartError
from lmi.gateway import local_url
from lmi.http.listener import bind
from lmi.runtime import ServerRuntime
from lmi.settings.config import Config, ServerConfig
from lmi.settings.resolve import Resolved
from lmi.settings.served_folder import PLATFORM_FOLDER
from lmi.shared import linux, processes
from lmi.shared.log import count_dropped_in, follow
from lmi.shared.memory_file import MemoryFile
from lmi.shared.signals import ENDING, SignalPipe
from lmi.shared.state import Phase
from lmi.sources.processes import Fetch, FetchProcesses
from lmi.supervisor import kinds, messages, stages
from lmi.supervisor.child import Child, Failure
from lmi.supervisor.cores import Cores, claimed, usable
from lmi.supervisor.credentials import hand_over, read_again
from lmi.supervisor.gateway import gateways
from lmi.supervisor.memory import bytes_held
from lmi.supervisor.pauses import LATE_TURN_S, PauseNotes, Pauses
from lmi.supervisor.restarts import DRAIN_CUT_S, DRAIN_END_S, drain_notice_s
from lmi.supervisor.running_model import RunningModel
from lmi.supervisor.stages import Settle, Stage
from lmi.supervisor.takeover import LEAST_LEAVING_S, Handover, Predecessor, find
from lmi.supervisor.throughput import Throughput

# The loop waits so long for signals, deaths and output.
TICK_S = 0.2
LOADING_TICK_S = 0.05
# SageMaker may not wait for a start that takes so long.
WARN_AFTER_S = 300.0
# The time of each stage of an immediate end: engines end, clients get their errors, front ends end.
STOP_S = 0.5
# The time for processes that libraries have started, which tidy up after an engine and then end by
# themselves.
STRAYS_S = 0.3
OWN_OOM_SCORE = -500
TOLD_TO_STOP = "the server was told to stop"

log = logging.getLogger(__name__)


class Supervisor:
    """One server and its children. It loads (LOADING), serves (READY), and ends in a drain
    (DRAINING) or FAILED.

    Before the drain it may serve on while others are told that it will end (LEAVING).
    """

    def __init__(
        self,
        runtime: ServerRuntime,
        listeners: Sequence[socket.socket],
        signal_pipe: SignalPipe,
        steps: Iterator[Stage | Config],
        credentials: MemoryFile | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._block = runtime.attach()
        # The sockets of the server's port, and of that for management, if there is one.
        self._listeners = listeners
        # The server whose ports this one takes over, if it does.
        self._predecessor = predecessor
        self._handover = Handover(listeners, predecessor.end if predecessor else None)
        self._signal_pipe = signal_pipe
        # What the files of keys and certificates hold, for front ends. None: there are none.
        self._credentials = credentials
        # The stages of the start that are left, and then the settings of the model.
        self._steps = steps
        self._stage: Stage | None = None

        self._models: Sequence[RunningModel] = ()
        self._follow: Callable[[], None] = lambda: None
        if self._config.multi_model:
            from lmi.models.follower import ModelFollower

            follower = ModelFollower(runtime)
            self._models = follower.models
            self._follow = follower.look

        # The cores that front ends are bound to. None: they may use all.
        self._cores: Sequence[int] = ()
        front_end = kinds.front_end(
            runtime, self._block, listeners, lambda: self._cores, credentials
        )
        self._front_end = Child(front_end)
        self._gateways = gateways(runtime, listeners[0].getsockname()[1])
        self._fetches = FetchProcesses(runtime)
        self._pauses = Pauses(LATE_TURN_S)
        self._pause_notes = PauseNotes()
        self._throughput = Throughput(self._config.throughput_interval_s, time.monotonic())

        # It is also in the supervisor's record, where `/ping` reads it.
        self._phase = Phase.STARTING
        self._started_s = time.monotonic()
        # When the phase began.
        self._phase_s = self._started_s
        # When the start counts as slow; infinite after the warning.
        self._warn_after_s = WARN_AFTER_S
        # How long a drain answers 503 before the port closes.
        self._notice_s = 0.0
        self._failure: Failure | None = None
        # Set when the server ends.
        self._exit_code: int | None = None

    def run(self) -> int:
        """Serve until a signal or a failure ends the server. Returns the exit code."""
        self._block.supervisor.claim()
        count_dropped_in(self._block.supervisor)
        self._enter(Phase.LOADING)
        try:
            self._advance()
            # The first children start at once.
            self._tick(0.0)
            while self._exit_code is None:
                self._tick(LOADING_TICK_S if self._phase == Phase.LOADING else TICK_S)
        finally:
            self._stop_all()
            messages.clear_bar()

        if self._failure is not None:
            messages.say_failed(self._failure, self._config.log_format)

        return self._exit_code

    @property
    def _children(self) -> list[Child]:
        return [self._front_end, *self._workers]

    @property
    def _workers(self) -> list[Child]:
        """The children that are no front ends."""
        children: list[Child] = []
        if self._stage is not None:
            children.append(self._stage)

        children += self._gateways
        children += self._fetches
        for model in self._models:
            children += model.children

        return children

    def _advance(self) -> None:
        """Begin the next stage of the start. After the last one the model's processes start."""
        try:
            step = next(self._steps, None)
            self._stage = None
            if isinstance(step, Stage):
                self._stage = step
            elif step is not None:
                self._add_model(step)
        except StartError as error:
            self._fail(Failure.of(error, "start"))
        except Exception as error:
            log.exception("the start failed")
            self._fail(Failure.of(StartError(f"{type(error).__name__}: {error}"), "start"))

    def _add_model(self, config: Config) -> None:
        """Let the children of the model begin, on cores of their own where there are enough."""
        self._block.supervisor.stage = ""
        front_end_pids = self._front_end_pids()
        cores = claimed(Cores.of(config, os.environ, usable()))
        if cores is None:
            self._cores = ()
        else:
            self._cores = cores.others
            for pid in front_end_pids:
                linux.bind_threads(self._cores, pid)

        runtime = self._runtime.add_model(config, register_beside)
        self._models = (RunningModel(runtime, cores, bytes_held(front_end_pids)),)
        self._runtime.show_model(runtime)

    def _enter(self, phase: Phase, reason: str = "") -> None:
        self._phase = phase
        self._phase_s = time.monotonic()
        self._block.supervisor.phase = phase
        self._block.supervisor.reason = reason

    @property
    def _is_ending(self) -> bool:
        return self._phase in (Phase.DRAINING, Phase.FAILED)

    def _tick(self, timeout_s: float) -> None:
        """Take one turn of the loop: do what signals and deaths ask for, and what is due."""
        for signum in self._wait(timeout_s):
            self._on_signal(signum)

        for pid, code in processes.reap():
            self._on_exit(pid, code, time.monotonic())

        now = time.monotonic()
        self._log_what_goes_on(now)
        for model in self._models:
            model.block.supervisor.log_level = self._block.supervisor.log_level

        if self._failure is not None:
            # By then `/ping` has reported it for long enough.
            if now - self._phase_s >= self._failure.notice_s:
                self._exit_code = self._failure.code

            return

        if self._predecessor is not None:
            self._predecessor.look()

        if self._is_listening:
            heir = self._handover.look()
            if heir is not None:
                self._hand_over(heir)

        if self._phase == Phase.DRAINING:
            self._drain(now)
        else:
            self._look_after_children(now)

    def _log_what_goes_on(self, now: float) -> None:
        """Log the engines' throughput, and that the machine has paused this process."""
        engines = (record for model in self._models for record in model.block.engines)
        self._throughput.look(engines, now)
        note = self._pause_notes.note(self._pauses.note(now), now)
        if note:
            log.info("%s", note)

    def _look_after_children(self, now: float) -> None:
        """Do what is due in every turn before a drain: start, judge and restart children, go on
        with the start, and announce that the server is ready.
        """
        self._leave_in_time(now)
        self._follow()
        for model in self._models:
            model.look(now)

        self._fetches.look()
        if self._stage is not None:
            self._stage.show_in(self._block.supervisor)
            if self._stage.is_done:
                self._advance()

        children = self._children if self._may_accept else self._workers
        for child in children:
            child.look(now, self._pauses)

        self._announce()
        self._warn_of_slow_start(now)

    def _wait(self, timeout_s: float) -> list[signal.Signals]:
        """Wait for signals, and for deaths and output of the children. Logs the output, and returns
        the signals.
        """
        outputs = []
        for child in self._children:
            if child.output is not None and child.output.is_open:
                outputs.append(child.output)

        now = time.monotonic()
        readers = [output.reader for output in outputs if output.may_wake(now)]
        signals = self._signal_pipe.wait(timeout_s, readers)
        for output in outputs:
            output.read()

        return signals

    def _on_signal(self, signum: signal.Signals) -> None:
        """SIGTERM begins the end, or goes on with it, and any other signal that ends a process
        stops the server now. SIGHUP reads credentials again, or says that the terminal is gone.
        SIGUSR1 switches debugging on or off.
        """
        terminal_is_gone = (
            signum == signal.SIGHUP and self._credentials is None and sys.stderr.isatty()
        )

        if signum == signal.SIGTERM and not self._is_ending:
            self._begin_end()
        elif signum in ENDING or terminal_is_gone:
            log.info("%s: stopping now", signum.name)
            self._exit_code = 128 + signum if self._failure is None else self._failure.code
        elif signum == signal.SIGHUP and self._credentials is not None:
            read_again(self._config, self._credentials, self._block.supervisor)
        elif signum == signal.SIGUSR1:
            self._toggle_debug()

    def _begin_end(self) -> None:
        """Serve on for `drain_delay` if there is one and the server is ready. Else drain."""
        delay_s = self._config.drain_delay_s
        timeout_s = self._config.drain_timeout_s
        if self._phase == Phase.READY and delay_s:
            log.info(
                "SIGTERM: new requests are served for %g s more, then open ones have %g s",
                delay_s,
                timeout_s,
            )
            self._enter(Phase.LEAVING, TOLD_TO_STOP)
        else:
            self._begin_drain("SIGTERM: ", drain_notice_s(timeout_s))

    def _toggle_debug(self) -> None:
        """Log from DEBUG on, or again from the level of the settings on. All processes that have a
        record do the same.
        """
        configured = logging.getLevelNamesMapping()[self._config.log_level]
        is_debug = logging.getLogger().level == logging.DEBUG
        level = max(logging.INFO, configured) if is_debug else logging.DEBUG
        self._block.supervisor.log_level = level
        follow(level)

    def _on_exit(self, pid: int, code: int, now: float) -> None:
        """Let the child know that its process has ended, and end what depends on it if it has
        failed.
        """
        child = next((child for child in self._children if child.pid == pid), None)
        # Without a child, it may be a front end that has outlived gunicorn's master.
        if child is None:
            for record in self._block.frontends:
                if record.pid == pid:
                    record.release()

            return

        is_ending = self._is_ending or child.is_retired
        failure = child.exited(code, now, is_ending=is_ending)
        model = next((model for model in self._models if child in model.children), None)
        if failure is not None and isinstance(child, Fetch):
            child.fail(failure)
        elif failure is not None:
            self._fail(failure, model)
        elif model is not None and not is_ending and not child.is_done:
            model.block.supervisor.num_engine_restarts += 1

    def _fail(self, failure: Failure, model: RunningModel | None = None) -> None:
        """End the server, or only the model if the server can go on without it."""
        if model is None or not model.give_up(failure.message, time.monotonic()):
            self._failure = failure
            self._enter(Phase.FAILED, failure.message)

    @property
    def _may_accept(self) -> bool:
        """Whether front ends may run. While another server has the port they must not take its
        clients before there is a model to answer them.
        """
        if self._predecessor is None or not self._predecessor.is_there:
            return True

        return any(model.is_ready for model in self._models)

    def _hand_over(self, heir: int) -> None:
        """Leave the port to the server that took it over, and serve only the connections that are
        there.
        """
        self._handover.close()
        self._block.supervisor.heir = heir
        if self._phase != Phase.DRAINING:
            log.info(
                "process %d has taken the port over, and this server answers the connections that "
                "it has",
                heir,
            )
            self._enter(Phase.LEAVING, TOLD_TO_STOP)

    def _announce(self) -> None:
        """Be READY and print the banner, as soon as the server can give its first answer."""
        if self._phase != Phase.LOADING or not self._has_front_ends:
            return

        port = self._listeners[0].getsockname()[1]
        after_s = time.monotonic() - self._started_s
        if self._config.multi_model:
            self._enter(Phase.READY)
            messages.say_ready_for_models(self._config, port, after_s)
            return

        for model in self._models:
            has_tokenizer = any(record.pid for record in model.block.frontends)
            if not model.is_ready or not has_tokenizer:
                continue

            self._enter(Phase.READY)
            messages.say_ready(model.config, port, model.report(), after_s)
            if self._predecessor is not None:
                self._predecessor.say_ready()

    @property
    def _has_front_ends(self) -> bool:
        """Whether enough front ends run: one, or all if they replace those of another server."""
        num_front_ends = sum(record.beat_s > 0 for record in self._block.frontends)
        if self._predecessor is not None and self._predecessor.is_there:
            return num_front_ends >= self._config.frontend_workers

        return num_front_ends >= 1

    def _warn_of_slow_start(self, now: float) -> None:
        """Warn once, on SageMaker, if the start takes so long that the platform may give up."""
        is_late = self._pauses.ran_s(self._started_s, now) >= self._warn_after_s
        if self._phase != Phase.LOADING or not is_late:
            return

        self._warn_after_s = math.inf
        folder = next((model.config.model.path for model in self._models), "")
        if not is_on_sagemaker(os.environ, folder):
            return

        engines = [record for model in self._models for record in model.block.engines]
        record = engines[0] if engines else self._block.supervisor
        stage = record.stage or "start"
        log.warning("%s", messages.slow_start(now - self._started_s, stage, record.progress))

    def _leave_in_time(self, now: float) -> None:
        """Begin the drain at the end of `drain_delay`, in which `/ping` has said that the server
        leaves.
        """
        if self._phase != Phase.LEAVING:
            return

        delay_s = self._config.drain_delay_s
        if self._block.supervisor.heir:
            delay_s = max(delay_s, LEAST_LEAVING_S)

        if self._pauses.ran_s(self._phase_s, now) >= delay_s:
            self._begin_drain("", notice_s=0.0)

    def _begin_drain(self, reason: str, notice_s: float) -> None:
        """Take no new requests. They are answered with 503 for `notice_s`, then the port closes."""
        log.info("%sno new requests, open ones have %g s", reason, self._config.drain_timeout_s)
        self._notice_s = notice_s
        self._enter(Phase.DRAINING, TOLD_TO_STOP)

    def _drain(self, now: float) -> None:
        """Take the next step of a drain: stop the front ends first, and the engines when no front
        end needs them.
        """
        timeout_s = self._config.drain_timeout_s
        since_s = self._pauses.ran_s(self._phase_s, now)
        is_serving = self._config.multi_model or self._has_ready_worker
        # For `_notice_s` the port stays open and answers 503.
        is_noticed = since_s >= self._notice_s
        if self._is_listening and (is_noticed or not is_serving):
            self._stop_listening()
            self._front_end.send(signal.SIGTERM)

        # Workers whose master is dead count too.
        has_workers = any(map(processes.is_alive, self._front_end_pids()))
        has_front_ends = self._front_end.pid is not None or has_workers
        if not self._is_listening and not (is_serving and has_front_ends):
            _send(self._workers, signal.SIGTERM)

        if since_s >= timeout_s + DRAIN_CUT_S:
            self._front_end.send(signal.SIGKILL)

        is_over = since_s >= timeout_s + DRAIN_END_S
        if is_over or not any(child.pid for child in self._children):
            self._exit_code = 0

    @property
    def _has_ready_worker(self) -> bool:
        for child in self._workers:
            if child.record is not None and child.record.phase == Phase.READY:
                return True

        return False

    @property
    def _is_listening(self) -> bool:
        return self._listeners[0].fileno() >= 0

    def _stop_listening(self) -> None:
        self._handover.close()
        for listener in self._listeners:
            listener.close()

    def _front_end_pids(self) -> list[int]:
        """Return gunicorn's master, if it runs, and every worker of it."""
        pids = [record.pid for record in self._block.frontends if record.pid]
        if self._front_end.pid is not None:
            pids.insert(0, self._front_end.pid)

        return pids

    def _stop_all(self) -> None:
        """Stop all children. When it returns, every process that can be killed has ended, and
        clients have got their errors.
        """
        self._stop_listening()
        self._stop(self._workers)
        if self._front_end.pid is not None:
            self._wait_while(lambda: any(record.num_in_flight for record in self._block.frontends))

        self._stop([self._front_end])
        self._kill_strays()
        for child in self._children:
            child.read_last()

    def _kill_strays(self) -> None:
        """Wait a moment for processes that children have left behind, then kill them."""
        patient_until_s = time.monotonic() + STRAYS_S
        pids = processes.children()
        while pids and time.monotonic() < patient_until_s + STOP_S:
            if time.monotonic() > patient_until_s:
                for pid in pids:
                    processes.send(pid, signal.SIGKILL)

            self._wait(0.02)
            processes.reap()
            pids = processes.children()

    def _stop(self, children: Iterable[Child]) -> None:
        """Send SIGTERM to these children, and kill those that do not end."""
        pids = {child.pid for child in children if child.pid is not None}
        _send(children, signal.SIGTERM)
        self._wait_while(lambda: pids & set(processes.children()))
        _send(children, signal.SIGKILL)

    def _wait_while(self, holds: Callable[[], object]) -> None:
        """Wait until something no longer holds, for STOP_S at most."""
        deadline_s = time.monotonic() + STOP_S
        while holds() and time.monotonic() < deadline_s:
            self._wait(0.02)
            processes.reap()


def is_on_sagemaker(environ: Mapping[str, str], folder: str) -> bool:
    """Return whether SageMaker seems to run this server of the model in `folder`."""
    return folder == str(PLATFORM_FOLDER) or any(name.startswith("SAGEMAKER_") for name in environ)


def _send(children: Iterable[Child], signum: signal.Signals) -> None:
    for child in children:
        child.send(signum)


def _listeners_of(config: ServerConfig, predecessor: Predecessor | None) -> list[socket.socket]:
    """Return the listening sockets of a server, where it can those of the one that it replaces.
    Raises PortUnavailable.
    """
    listen = bind if predecessor is None else predecessor.listener
    listeners = [listen(config.host, config.port)]
    if config.management_port is not None:
        listeners.append(listen(config.host, config.management_port))

    if predecessor is not None:
        predecessor.close_others()

    return listeners


def serve(resolved: Resolved, settle: Settle) -> int:
    """Serve until a signal or a failure ends the server. Returns the exit code. Raises StartError
    before any child has started.
    """
    config = resolved.config.server
    stages.check_memory()
    stages.raise_file_limit()
    num_engines = 1 if config.multi_model else resolved.config.engine.num_engines
    stages.check_task_limit(config.frontend_workers, num_engines)

    credentials = hand_over(config)
    predecessor = find(config.host, config.port) if config.takeover else None
    listeners = _listeners_of(config, predecessor)

    linux.set_title("lmi-supervisor")
    linux.adopt_orphans()
    linux.set_oom_score(OWN_OOM_SCORE)
    linux.hide_memory()

    signal_pipe = SignalPipe()
    if config.user is not None:
        # Front ends read what root writes.
        os.umask(0o022)

    stages.remove_leftovers()
    runtime = ServerRuntime.create(config)
    try:
        if config.user is not None:
            stages.check_user(config.user, runtime)

        steps = stages.stages(resolved, settle, runtime)
        url = local_url(config.host, listeners[0].getsockname()[1], config.scheme)
        with runtime.running(url):
            return Supervisor(
                runtime, listeners, signal_pipe, steps, credentials, predecessor
            ).run()
    finally:
        runtime.remove()


def run(resolved: Resolved, settle: Settle) -> int:
    """Serve, and return the exit code. Prints why a start fails. `settle` completes the settings
    after a fetch.
    """
    try:
        return serve(resolved, settle)
    except StartError as error:
        messages.say_failed(Failure.of(error, "start"), resolved.config.server.log_format)
        return error.exit_code
