"""The contest: every contestant is loaded once, and they run the same bursts in turns, the others
idle meanwhile.

Servers also start in turns.
"""

import dataclasses
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts.benchmarks import servers
from scripts.benchmarks.peers.worker import PORT, READY_S, Burst, Outcome
from scripts.benchmarks.start import SETTLE_S, pss_mb

ROOT = Path(__file__).resolve().parents[3]
# Of its time, for a burst to count as quiet
MAX_WAITED = 0.04
NUM_STARTS = 3
# For one burst, and for the start of an engine
BURST_LIMIT_S = 600.0


@dataclass(frozen=True)
class Contestant:
    name: str
    # A name of `worker.ENGINES`
    engine: str
    settings: dict[str, Any]
    python: str = sys.executable
    environ: dict[str, str] = field(default_factory=dict)


class ContestantLost(Exception):
    """An engine ended, or was ended because it took too long. The message has its name and its exit
    code.
    """


@dataclass
class Worker:
    """A process of `worker`, in a process group of its own."""

    contestant: Contestant
    process: subprocess.Popen[str]
    limit_s: float = BURST_LIMIT_S

    @property
    def is_in(self) -> bool:
        """Whether it takes part still."""
        return self.process.poll() is None

    def run(self, burst: Burst) -> Outcome:
        """Run one burst. Raises ContestantLost."""
        answers, asks = _pipes(self.process)
        try:
            asks.write(json.dumps(dataclasses.asdict(burst)) + "\n")
            asks.flush()
        except BrokenPipeError:
            # Its answers are at their end too
            pass

        return Outcome(**self._line(answers))

    def wait_ready(self) -> None:
        """Wait until the engine is loaded. Raises ContestantLost."""
        self._line(_pipes(self.process)[0])

    def _line(self, answers: IO[str]) -> Any:
        is_late = not select.select([answers], [], [], self.limit_s)[0]
        line = "" if is_late else answers.readline()
        if line:
            return json.loads(line)

        self.end(0 if is_late else 10)
        why = (
            f"took more than {self.limit_s:g} s"
            if is_late
            else f"ended with {self.process.returncode}"
        )
        raise ContestantLost(f"{self.contestant.name} {why}")

    def end(self, timeout_s: float) -> None:
        """Wait so long for its end, then leave nothing of it and of the server that it may have
        started.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

        self.process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdout is not None and process.stdin is not None
    return process.stdout, process.stdin


@contextmanager
def workers(contestants: Sequence[Contestant], log: Path) -> Iterator[list[Worker]]:
    """Start one after another. Who does not get ready is left out, with one line that says so."""
    started: list[Worker] = []
    try:
        for contestant in contestants:
            worker = _start(contestant, log)
            try:
                worker.wait_ready()
            except ContestantLost as error:
                say(f"left out: {error}; its output is in {log}")
            finally:
                started.append(worker)

        yield [worker for worker in started if worker.is_in]
    finally:
        for worker in started:
            with suppress(BrokenPipeError):
                # At the end of its input it ends
                _pipes(worker.process)[1].close()

        for worker in started:
            _end(worker)


def _end(worker: Worker) -> None:
    worker.end(60)
    _pipes(worker.process)[0].close()


def _start(contestant: Contestant, log: Path) -> Worker:
    command = [contestant.python, "-m", "scripts.benchmarks.peers.worker"]
    command += [contestant.engine, json.dumps(contestant.settings)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "1000"} | contestant.environ
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    return Worker(contestant, process)


@dataclass(frozen=True)
class Figure:
    """The outcomes of one contestant for one kind of burst."""

    outcomes: tuple[Outcome, ...]

    @property
    def is_quiet(self) -> bool:
        return any(outcome.waited <= MAX_WAITED for outcome in self.outcomes)

    def counted(self) -> list[Outcome]:
        """The quiet ones, or, where there is none, the one that waited least."""
        quiet = [outcome for outcome in self.outcomes if outcome.waited <= MAX_WAITED]
        return quiet or [min(self.outcomes, key=lambda outcome: outcome.waited)]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(outcome.num_tokens / outcome.seconds for outcome in self.counted())

    @property
    def seconds(self) -> float:
        return statistics.median(outcome.seconds for outcome in self.counted())

    @property
    def first_ms(self) -> float:
        return (
            statistics.median(statistics.median(outcome.first_s) for outcome in self.counted())
            * 1000
        )


def play(
    contestants: Sequence[Worker], burst: Burst, rounds: int, deadline_s: float
) -> dict[str, Figure]:
    """Run a kind of burst in rounds, each in the reverse order of the last one, and one more for
    each that had none quiet, at most as many again. Every round has other prompts. A worker that
    fails has no figure, in this play and in those that come.
    """
    outcomes: dict[str, list[Outcome]] = {worker.contestant.name: [] for worker in contestants}
    for number in range(2 * rounds):
        for worker in contestants if number % 2 else reversed(contestants):
            done = outcomes[worker.contestant.name]
            is_done = number >= rounds and any(outcome.waited <= MAX_WAITED for outcome in done)
            if worker.is_in and not is_done:
                _run(worker, dataclasses.replace(burst, seed=burst.seed + number), done)

        if time.monotonic() > deadline_s:
            break

    return {name: Figure(tuple(done)) for name, done in outcomes.items() if done}


def _run(worker: Worker, burst: Burst, done: list[Outcome]) -> None:
    """Add an outcome. If the worker fails, what it did in this play is gone."""
    try:
        done.append(worker.run(burst))
    except ContestantLost as error:
        done.clear()
        say(f"left: {error} in a burst of {burst.num_streams} prompts of {burst.num_prompt} tokens")


@dataclass(frozen=True)
class Start:
    # From its exec to the first 200 of its health check
    seconds: float
    # PSS of all its processes
    idle_mb: float


def play_starts(contestants: Sequence[Contestant]) -> dict[str, Start]:
    """Return the medians of each server. One that does not start is left out, with a line that says
    so.
    """
    starts_of: dict[str, list[Start]] = {contestant.name: [] for contestant in contestants}
    for number in range(NUM_STARTS):
        for contestant in contestants if number % 2 else reversed(contestants):
            try:
                starts_of[contestant.name].append(_start_of(contestant, **contestant.settings))
            except (RuntimeError, TimeoutError) as error:
                say(f"left out: {contestant.name}: {error}")

    return {
        name: Start(
            statistics.median(start.seconds for start in starts),
            statistics.median(start.idle_mb for start in starts),
        )
        for name, starts in starts_of.items()
        if starts
    }


def _start_of(
    contestant: Contestant, command: list[str], health: str, environ: Mapping[str, str | None]
) -> Start:
    port = servers.free_port()
    command = [str(port) if word == PORT else word for word in command]
    environ = {"PYTHONPATH": str(ROOT), **contestant.environ, **environ}
    with servers.process(command, port, environ, health, READY_S) as server:
        time.sleep(SETTLE_S)
        return Start(server.start_s, sum(pss_mb(server).values()))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
