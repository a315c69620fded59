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
from typing import IO, Any, TypeVar

from scripts.benchmarks import servers
from scripts.benchmarks.peers.worker import PORT, READY_S, Burst, Outcome, Start
from scripts.benchmarks.start import SETTLE_S, pss_mb

ROOT = Path(__file__).resolve().parents[3]
# A burst is quiet if its engine waited for a core for no more than this share of its time.
MAX_WAITED = 0.04
NUM_STARTS = 3
# The longest burst, and the longest start of an engine.
BURST_LIMIT_S = 600.0


T = TypeVar("T")


@dataclass(frozen=True)
class Contestant:
    name: str
    # A name of `worker.ENGINES`.
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
    # Once it is ready.
    start: Start | None = None

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
        self.start = Start(**self._line(_pipes(self.process)[0]))

    def _line(self, answers: IO[str]) -> Any:
        """Return the next answer. Raises ContestantLost."""
        name = self.contestant.name
        ready, _, _ = select.select([answers], [], [], self.limit_s)
        if not ready:
            self.end(0)
            raise ContestantLost(f"{name} took more than {self.limit_s:g} s")

        line = answers.readline()
        if not line:
            self.end(10)
            raise ContestantLost(f"{name} ended with {self.process.returncode}")

        return json.loads(line)

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
    """Start one contestant after another. One that does not get ready is left out, with a line that
    says so.
    """
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
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GOMP_SPINCOUNT": "1000",
        **contestant.environ,
    }
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
        """Return the quiet ones, or, where there is none, the one that waited least."""
        quiet = [outcome for outcome in self.outcomes if outcome.waited <= MAX_WAITED]
        if quiet:
            return quiet

        return [min(self.outcomes, key=lambda outcome: outcome.waited)]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(outcome.num_tokens / outcome.seconds for outcome in self.counted())

    @property
    def seconds(self) -> float:
        return statistics.median(outcome.seconds for outcome in self.counted())

    @property
    def decoded_per_s(self) -> float:
        """Tokens/s behind the first tokens, where all requests begin together."""
        return statistics.median(
            (outcome.num_tokens - len(outcome.first_s)) / (outcome.seconds - max(outcome.first_s))
            for outcome in self.counted()
        )

    @property
    def first_ms(self) -> float:
        """The time to the first token: a median over requests, and over outcomes."""
        medians_s = [statistics.median(outcome.first_s) for outcome in self.counted()]
        return statistics.median(medians_s) * 1000


def play(
    contestants: Sequence[Worker], burst: Burst, rounds: int, deadline_s: float
) -> dict[str, Figure]:
    """Run a kind of burst in rounds, each with other prompts, and in the reverse order of the last.

    Contestants without a quiet burst get further rounds, at most as many again. A worker that fails
    has no figure, in this play and in those that come.
    """
    outcomes_of: dict[str, list[Outcome]] = {worker.contestant.name: [] for worker in contestants}
    for number in range(2 * rounds):
        burst_of_round = dataclasses.replace(burst, seed=burst.seed + number)
        for worker in in_turns(contestants, number):
            outcomes = outcomes_of[worker.contestant.name]
            has_quiet = any(outcome.waited <= MAX_WAITED for outcome in outcomes)
            is_done = number >= rounds and has_quiet
            if worker.is_in and not is_done:
                _run(worker, burst_of_round, outcomes)

        if time.monotonic() > deadline_s:
            break

    return {name: Figure(tuple(outcomes)) for name, outcomes in outcomes_of.items() if outcomes}


def in_turns(contestants: Sequence[T], number: int) -> Sequence[T]:
    """Return the contestants in the order of a round, which is that of the last one reversed."""
    if number % 2:
        return contestants

    return contestants[::-1]


def _run(worker: Worker, burst: Burst, outcomes: list[Outcome]) -> None:
    """Add an outcome. If the worker fails, what it did in this play is gone."""
    try:
        outcomes.append(worker.run(burst))
    except ContestantLost as error:
        outcomes.clear()
        say(f"left: {error} in a burst of {burst.num_streams} prompts of {burst.num_prompt} tokens")


def play_starts(contestants: Sequence[Contestant]) -> dict[str, Start]:
    """Return the medians of each server. One that does not start is left out, with a line that says
    so.
    """
    starts_of: dict[str, list[Start]] = {contestant.name: [] for contestant in contestants}
    for number in range(NUM_STARTS):
        for contestant in in_turns(contestants, number):
            try:
                start = _start_of(contestant, **contestant.settings)
            except (RuntimeError, TimeoutError) as error:
                say(f"left out: {contestant.name}: {error}")
            else:
                starts_of[contestant.name].append(start)

    medians: dict[str, Start] = {}
    for name, starts in starts_of.items():
        if starts:
            medians[name] = Start(
                statistics.median(start.seconds for start in starts),
                statistics.median(start.idle_mb for start in starts),
            )

    return medians


def _start_of(
    contestant: Contestant, command: list[str], health: str, environ: Mapping[str, str | None]
) -> Start:
    """Start a server once, and return how that went. Raises RuntimeError or TimeoutError."""
    port = servers.free_port()
    command_with_port = [str(port) if word == PORT else word for word in command]
    all_variables = {"PYTHONPATH": str(ROOT), **contestant.environ, **environ}
    with servers.process(command_with_port, port, all_variables, health, READY_S) as server:
        time.sleep(SETTLE_S)
        idle_mb = sum(pss_mb(server).values())
        return Start(server.start_s, idle_mb)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
