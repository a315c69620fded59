"""The contest: every contestant is loaded once, and they run the same bursts in turns, the others idle meanwhile."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts.benchmarks.peers.worker import Burst, Outcome

ROOT = Path(__file__).resolve().parents[3]
MAX_WAITED = 0.04  # of its time, for a burst to count as quiet


@dataclass(frozen=True)
class Contestant:
    name: str
    engine: str  # a name of `worker.ENGINES`
    settings: dict[str, Any]
    python: str = sys.executable
    environ: dict[str, str] = field(default_factory=dict)


@dataclass
class Worker:
    """A process of `worker` that is ready."""

    contestant: Contestant
    process: subprocess.Popen[str]

    def run(self, burst: Burst) -> Outcome:
        answers, asks = _pipes(self.process)
        asks.write(json.dumps(dataclasses.asdict(burst)) + "\n")
        asks.flush()
        return Outcome(**self._line(answers))

    def wait_ready(self) -> None:
        self._line(_pipes(self.process)[0])

    def _line(self, answers: IO[str]) -> Any:
        line = answers.readline()
        if not line:
            raise RuntimeError(f"{self.contestant.name} ended with {self.process.wait()}")
        return json.loads(line)


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
            except RuntimeError as error:
                say(f"left out: {error}; its output is in {log}")
                continue
            finally:
                started.append(worker)
        yield [worker for worker in started if worker.process.poll() is None]
    finally:
        for worker in started:
            _pipes(worker.process)[1].close()  # at the end of its input it ends
        for worker in started:
            _end(worker.process)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
    _pipes(process)[0].close()


def _start(contestant: Contestant, log: Path) -> Worker:
    command = [contestant.python, "-m", "scripts.benchmarks.peers.worker"]
    command += [contestant.engine, json.dumps(contestant.settings)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "1000"} | contestant.environ
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
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
        return statistics.median(statistics.median(outcome.first_s) for outcome in self.counted()) * 1000


def play(own: Sequence[Worker], burst: Burst, rounds: int, deadline_s: float) -> dict[str, Figure]:
    """Run a kind of burst in rounds, each in the reverse order of the last one, and one more for each that had none
    quiet, at most as many again. Every round has other prompts.
    """
    outcomes: dict[str, list[Outcome]] = {worker.contestant.name: [] for worker in own}
    for number in range(2 * rounds):
        for worker in own if number % 2 else reversed(own):
            done = outcomes[worker.contestant.name]
            if number >= rounds and any(outcome.waited <= MAX_WAITED for outcome in done):
                continue
            done.append(worker.run(dataclasses.replace(burst, seed=burst.seed + number)))
        if time.monotonic() > deadline_s:
            break
    return {name: Figure(tuple(done)) for name, done in outcomes.items()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
