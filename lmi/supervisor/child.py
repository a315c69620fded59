"""One child process of the supervisor: how it is started, judged, and started again when it dies.

The supervisor calls `look` of each child in turn, and `exited` when a process has ended.
"""

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from msgspec import Struct

from lmi.errors import NoMemory, StartError
from lmi.shared import linux, processes
from lmi.shared.state import EngineRecord, Phase
from lmi.supervisor.hangs import HangLimits, StepWork, hang
from lmi.supervisor.output import ChildOutput
from lmi.supervisor.pauses import Pauses
from lmi.supervisor.restarts import LONGEST_DELAY_S, STEADY_S, RestartTable

# When the system refused a process, the next attempt comes after so long.
FORK_AGAIN_S = 1.0
# The least time between two lines of the log about that.
REFUSED_EVERY_S = 60.0
# How long a hung process may write its stacks before it is killed.
STACKS_S = 0.5

log = logging.getLogger(__name__)


class Failure(Struct, frozen=True, kw_only=True):
    """Why the server ends."""

    # The exit code of the server.
    code: int
    # The label of an error class.
    cause: str
    stage: str
    message: str
    # How long `/ping` reports it before the server ends.
    notice_s: float = 0.0

    @classmethod
    def of(cls, error: StartError, stage: str) -> Self:
        return cls(code=error.exit_code, cause=error.label, stage=stage, message=str(error))


class Cause(NamedTuple):
    """Why a process ended: on one line for people, and the label of the error, if there was one."""

    reason: str
    label: str = ""


class ChildKind(Struct, frozen=True, kw_only=True):
    """How the processes of one kind are started, judged, restarted and stopped."""

    # Its name for people, in which {slot} becomes the number.
    title: str
    # Return command and environment of the process in a slot.
    argv: Callable[[int], Sequence[str]]
    environ: Callable[[int], Mapping[str, str]]
    # Makes the process one of another user.
    become: Callable[[], None] | None = None
    inherited_fds: tuple[int, ...] = ()
    # The working directory of its processes; None: the supervisor's.
    folder: str | None = None
    # The logger of its output; None: it prints where the supervisor prints.
    output_logger: str | None = None
    oom_score: int = 0
    # When a process with a record counts as hung.
    limits: HangLimits | None = None
    # Makes the table that says when a process is started again.
    restarts: Callable[[], RestartTable]
    # Takes code and reason of an exit. Returns the error if no other start can mend it.
    fatal: Callable[[int, str], StartError | None]
    # The cause of a failure after too many deaths.
    lost_label: str
    # How long `/ping` reports that failure before the server ends.
    lost_notice_s: float = 0.0
    # Exit code 0 means that its work is done.
    is_one_shot: bool = False
    # Its processes hold the connections of clients. In a drain they stop before the others, in an
    # immediate end after them. Those that outlive their parent finish their requests.
    serves_clients: bool = False


class Child:
    """A place for one process of a kind, and its process while it runs."""

    def __init__(self, kind: ChildKind, slot: int = 0, record: EngineRecord | None = None) -> None:
        self.kind = kind
        self.name = kind.title.format(slot=slot)
        # None: its processes keep records of a different kind.
        self.record = record
        self.pid: int | None = None
        self.is_done = False
        # The records of the other replicas, which may serve without this one.
        self.others: Sequence[EngineRecord] = ()
        # The output of the running process, or of the last one.
        self.output: ChildOutput | None = None
        # Whether its process may end and does not start again.
        self.is_retired = False
        # A child of one shot that must be done before this one starts.
        self.waits_for: Child | None = None

        self._slot = slot
        self._table = kind.restarts()
        # When the next process may start.
        self._start_s = 0.0
        # When the log last said that the system refused one.
        self._refused_s = -math.inf
        # When this process started or, if it ends by itself, when its end began.
        self._began_s = 0.0
        # Whether this process was ever ready.
        self._was_ready = False
        # Whether it ends though nobody told it to.
        self._ends_by_itself = False
        # Why it counts as hung, or "".
        self._hung = ""
        self._work = StepWork(self._times)
        # When to kill a hung process.
        self._kill_s: float | None = None

    def look(self, now: float, pauses: Pauses) -> None:
        """Start the process when its time has come, notice that it is ready or hangs, and kill a
        hung one.
        """
        must_wait = self.waits_for is not None and not self.waits_for.is_done
        if self.is_retired or must_wait:
            return

        if self.pid is None:
            if now >= self._start_s and not self.is_done:
                self._start(now)
        elif self._kill_s is not None:
            if now >= self._kill_s:
                self.send(signal.SIGKILL)
        elif self.record is not None:
            self._judge(self.record, now, pauses)

    def _start(self, now: float) -> None:
        """Start the process, or try again soon if the machine has no memory or no descriptor for it
        now.
        """
        self._began_s = now
        self._kill_s = None
        self._hung = ""
        self._was_ready = False
        self._ends_by_itself = False
        if self.record is not None:
            self.record.num_starts += 1
            self.record.phase = Phase.STARTING

        self.close()
        try:
            self.pid = self._spawn()
        except OSError as error:
            self._start_s = now + FORK_AGAIN_S
            if now - self._refused_s >= REFUSED_EVERY_S:
                self._refused_s = now
                text = "%s cannot be started now: %s; it is tried each %g s"
                log.error(text, self.name, error.strerror, FORK_AGAIN_S)

            self.close()
            return

        self._refused_s = -math.inf
        if self.output:
            self.output.belongs_to(self.pid)

        if self.record is not None:
            log.info("%s starts as process %d", self.name, self.pid)

    def _spawn(self) -> int:
        """Start a process, with an output of its own if its kind has a logger, and return its pid.
        Raises OSError.
        """
        kind = self.kind
        self.output = None
        if kind.output_logger:
            self.output = ChildOutput(kind.output_logger, role=self.name)

        return linux.spawn(
            kind.argv(self._slot),
            kind.environ(self._slot),
            oom_score=kind.oom_score,
            become=kind.become,
            inherited_fds=kind.inherited_fds,
            folder=kind.folder,
            output_fd=self.output.writer if self.output else None,
        )

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the process, or SIGKILL to its whole group. Does nothing if no process
        runs.
        """
        if self.pid is not None:
            processes.send(self.pid, signum, to_group=signum == signal.SIGKILL)

    def read_last(self) -> None:
        """Log the last output of the process."""
        if self.output is not None:
            self.output.read_last()

    def close(self) -> None:
        """Close the output of the last process, which has ended."""
        if self.output is not None:
            self.output.close()

    def exited(self, code: int, now: float, *, is_ending: bool) -> Failure | None:
        """Note the end of the process and plan its next start. Returns the failure if no other
        start can help.
        """
        record = self.record
        cause = self._cause(code)
        if record is None:
            stage = self.kind.title
            was_ready = now - self._began_s >= STEADY_S
        else:
            stage = record.stage or Phase(record.phase).name.lower()
            # It may have become ready since the last turn.
            was_ready = self._was_ready or record.phase == Phase.READY

        self._clear(cause, now)
        self.is_done = self.kind.is_one_shot and code == 0
        if is_ending or self.is_done:
            return None

        error = self._fatal_error(code, cause.reason)
        if error is None:
            delay_s = self._table.delay_s(now, was_ready=was_ready)
            if delay_s is not None:
                self._start_s = now + delay_s
                log.error("%s lost: %s; next start in %g s", self.name, cause.reason, delay_s)
                return None

        if record is not None:
            record.phase = Phase.FAILED

        if error is not None:
            return Failure.of(error, stage)

        return self._give_up(cause.reason, stage, now)

    def _fatal_error(self, code: int, reason: str) -> StartError | None:
        """Return the error of an exit if no other start can mend it.

        A replica that has been restarted has none while another one serves: what is wrong may end
        by itself, as where a model's files were gone for a while.
        """
        was_restarted = self.record is not None and self.record.num_starts > 1
        if was_restarted and self._replica_serves:
            return None

        return self.kind.fatal(code, reason)

    def _give_up(self, reason: str, stage: str, now: float) -> Failure | None:
        """Return the failure of a child that died too often. If another replica serves, return None
        and try again, seldom.
        """
        deaths = f"died {self._table.num_deaths} times, the last time it {reason}"
        if self._table.max_deaths > 1 and self._replica_serves:
            self._start_s = now + LONGEST_DELAY_S
            log.error(
                "%s failed: it %s; another replica serves, next try in %g s",
                self.name,
                deaths,
                LONGEST_DELAY_S,
            )
            return None

        return Failure(
            code=1,
            cause=self.kind.lost_label,
            stage=stage,
            message=f"{self.name} {deaths}",
            notice_s=self.kind.lost_notice_s,
        )

    @property
    def _replica_serves(self) -> bool:
        return any(replica.phase == Phase.READY for replica in self.others)

    def _times(self) -> dict[int, float]:
        """Return the processor times of the threads by their ids, without that of the main one,
        which serves the socket and never steps.
        """
        if self.pid is None:
            return {}

        times = processes.processor_times(self.pid)
        times.pop(self.pid, None)
        return times

    def _judge(self, record: EngineRecord, now: float, pauses: Pauses) -> None:
        """Notice that the process is ready, or hangs, or is late."""
        if record.phase == Phase.DRAINING and not self._ends_by_itself:
            self._ends_by_itself = True
            self._began_s = now

        if record.phase == Phase.READY and not self._was_ready:
            self._was_ready = True
            if record.num_starts > 1:
                log.info(
                    "%s is ready, %.1f s after its last process was lost",
                    self.name,
                    now - record.lost_s,
                )

            return

        reason = None
        if self.kind.limits is not None:
            reason = hang(record, self.kind.limits, self._began_s, now, pauses, self._work)

        if reason:
            log.error("%s %s; its stacks follow, then it is killed", self.name, reason)
            self._note_loss(record, Cause(reason), now)
            self._hung = reason
            self._kill_s = now + STACKS_S
            self.send(signal.SIGUSR2)
        elif self._work.is_newly_late():
            log.warning(
                "%s has made no step for %.1f s and goes on, because it works: the machine gave "
                "it %.1f s of a core",
                self.name,
                now - record.step_s,
                self._work.worked_s,
            )

    def _cause(self, code: int) -> Cause:
        """Return why the process ended."""
        record = self.record
        if self._hung:
            return Cause(self._hung)

        # A reason without a pid is an old one: the process ended before it could write its own.
        if record is not None and code > 0 and record.pid and record.reason:
            return Cause(record.reason, record.cause)

        label = NoMemory.label if code == -signal.SIGKILL else ""
        return Cause(processes.describe_exit(code), label)

    def _clear(self, cause: Cause, now: float) -> None:
        """Clean up after the process: kill its group, log its last output, clear the gauges of its
        record.
        """
        if not self.kind.serves_clients:
            self.send(signal.SIGKILL)

        self.read_last()
        self.pid = None
        if self.record is not None:
            self.record.release()
            self._note_loss(self.record, cause, now)

    def _note_loss(self, record: EngineRecord, cause: Cause, now: float) -> None:
        """Write into the record that the process is lost, and why."""
        record.phase = Phase.LOST
        record.reason = cause.reason
        record.cause = cause.label
        record.lost_s = now
