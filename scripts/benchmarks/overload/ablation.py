"""What each part of the queue that learns is good for: the queue with one part away at a time, and
what that does to the figures.

    scripts/overload ablation [--write] [--all] [--seeds N] [--only PART,…]

The queue is the real one, the engine a clock (`clocked.py`), so that no other process moves a
figure. Each scene is run with several seeds of arrivals. A figure counts as moved if its mean
differs from the whole queue's by more than NOISE standard errors and a hundredth. `--write` puts
the table into docs/performance.md between its marks. `--only` measures some parts anew, or `whole`;
the others keep what was measured last.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from types import ModuleType
from typing import Any

from lmi.engine import overload, patience, speed
from lmi.engine.overload import LearningQueue
from lmi.engine.patience import ClientPatience
from lmi.engine.queue import QueueEntry, RequestQueue
from lmi.engine.speed import StepSums
from lmi.errors import Overloaded
from scripts.benchmarks.overload.clocked import (
    CAPACITY,
    LATE,
    LEFT,
    PLACES,
    PROMPT,
    PROMPT_TOKEN_S,
    REFUSED,
    ROW_S,
    STEP_S,
    TOKENS,
    WHOLE,
    Arrival,
    End,
    Engine,
    arrival,
    hog,
    poisson,
)
from scripts.benchmarks.table import PAGE, ROOT, markdown, write

MARKS = "<!-- ablation figures -->", "<!-- end of ablation figures -->"
# In standard errors of the mean.
NOISE = 3.0
LEAST_MOVE = 0.01
# Of the queue.
NUM_EXPRESS = 4
MAX_WAIT_S = 10.0
RESULTS = ROOT / "build" / "overload" / "ablation.json"
# One value for each seed.
Figures = dict[str, list[float]]
# The modules whose names a variant may replace.
MODULES = (overload, patience, speed)
# A scene gives its figures, by their names.
Scene = Callable[["Variant", int], dict[str, float]]


class Endless(ClientPatience):
    """Of clients who are never seen to leave."""

    def seconds(self, now: float) -> float:
        return math.inf


class Remembering(ClientPatience):
    """Nothing is forgotten."""

    def _forget(self, now: float) -> None:
        return


class NoWaitRefusals(LearningQueue):
    def _why_refused(self, entry: QueueEntry, now: float) -> str:
        max_wait_s = self._max_wait_s
        self._max_wait_s = math.inf
        reason = super()._why_refused(entry, now)
        self._max_wait_s = max_wait_s
        return reason


class NoDeadlineRefusals(LearningQueue):
    def _why_refused(self, entry: QueueEntry, now: float) -> str:
        deadline_s = entry.deadline_s
        entry.deadline_s = math.inf
        reason = super()._why_refused(entry, now)
        entry.deadline_s = deadline_s
        return reason


class NoDeadlineLateness(LearningQueue):
    def _lateness(self, entry: QueueEntry, now: float) -> Any:
        return RequestQueue._lateness(self, entry, now)


class NoPatienceRefusals(LearningQueue):
    def _why_refused(self, entry: QueueEntry, now: float) -> str:
        patience = self.patience
        self.patience = Endless()
        reason = super()._why_refused(entry, now)
        self.patience = patience
        return reason


class NoFirstPatience(LearningQueue):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_token_patience = Endless()


class NoForgetting(LearningQueue):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_token_patience = Remembering()
        self.patience = Remembering()


class NoSmallerBatch(LearningQueue):
    def _set_places(self, now: float) -> None:
        return


class NoLeastStep(LearningQueue):
    """The batch becomes smaller also where no batch could answer in time."""

    def _set_places(self, now: float) -> None:
        self.speed.least_step_s = 0.0
        super()._set_places(now)


class NoLongStepLearning(LearningQueue):
    """A batch that is not full teaches nothing."""

    def note_step(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._max_step_s = math.inf
        super().note_step(seconds, num_prompt_tokens, num_output_tokens)


class NoShortSteps(LearningQueue):
    """A short step counts like any other."""

    def note_step(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        num_express = self._num_express_running
        if num_output_tokens <= num_express:
            self._num_running += num_express
            self._num_express_running = 0

        super().note_step(seconds, num_prompt_tokens, num_output_tokens)
        if num_output_tokens <= num_express:
            self._num_running -= num_express
            self._num_express_running = num_express


class NoTurnsAhead(LearningQueue):
    """All who wait are taken to go before a request."""

    def _ahead_s(self, entry: QueueEntry) -> float:
        return self._waiting_s()


class NoNextEnd(LearningQueue):
    """A place is taken to be free at once."""

    def _next_end_s(self) -> float:
        return 0.0


class OneSecondLater(LearningQueue):
    def refusal(self, reason: str) -> Overloaded:
        error = super().refusal(reason)
        error.retry_after_s = 1
        return error


class FlatSums(StepSums):
    """A token of a prompt is taken to cost nothing beside the step."""

    @property
    def slope(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Variant:
    """The queue with a part away, which the title names."""

    title: str
    queue: type[LearningQueue] = LearningQueue
    options: Mapping[str, Any] = field(default_factory=dict)
    # Names of MODULES, and what stands there instead.
    names: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, step_s: float = STEP_S) -> Engine:
        options = {"num_express": NUM_EXPRESS, **self.options}
        return Engine(self.queue(PLACES, MAX_WAIT_S, **options), step_s)


# By their names: the whole queue, and what goes away from it.
VARIANTS = {
    "whole": Variant("nothing"),
    "short": Variant(
        "refusal once the queue was long for a second", options={"keeps_short": False}
    ),
    "wait": Variant("… of one that would wait for over `max_queue_wait`", NoWaitRefusals),
    "deadline": Variant("… of one that would end after its deadline", NoDeadlineRefusals),
    "first": Variant("… of one whose first token would come after clients leave", NoFirstPatience),
    "patience": Variant("… of one whose answer would end after clients leave", NoPatienceRefusals),
    "lateness": Variant("an end in the queue once the deadline cannot be met", NoDeadlineLateness),
    "next-end": Variant("the time until a place is free", NoNextEnd),
    "turns": Variant("of who waits only those go before who have had less", NoTurnsAhead),
    "prompts": Variant("prompt tokens have a cost of their own", names={"StepSums": FlatSums}),
    "memory": Variant("older steps count less", names={"MEMORY_S": math.inf}),
    "forget": Variant("patience is forgotten", NoForgetting),
    "instant": Variant("clients who leave together count once", names={"INSTANT_S": -1.0}),
    "stayed": Variant("a few clients are taken to have stayed", names={"NUM_STAYED": 0}),
    "part": Variant("a fifth of patience is left for errors", names={"SHARE_OF_PATIENCE": 1.0}),
    "batch": Variant("a smaller batch where clients leave before an answer", NoSmallerBatch),
    "least-step": Variant("… only where one could be small enough", NoLeastStep),
    "long-steps": Variant("… which also learns from its long steps", NoLongStepLearning),
    "express": Variant("express places", options={"num_express": 0}),
    "short-steps": Variant("a short step of express requests is a part of the next", NoShortSteps),
    "retry-after": Variant("`Retry-After` says how long who waits takes", OneSecondLater),
}


# The scenes.


def lasting(variant: Variant, seed: int, *, load: float) -> dict[str, float]:
    """Clients who leave after 5 s, at `load` times what the engine can do."""
    engine = variant.engine()
    engine.run(poisson(load * CAPACITY, 30, seed=seed, patience_s=5.0), 30)
    return {f"load {load:g}": whole_between(engine, 10, 30) / min(1.0, load)}


def mixed(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity, where one prompt in four is 40 times as long as the others."""
    long_prompt = 40 * PROMPT
    prompt_s = (0.75 * PROMPT + 0.25 * long_prompt) * PROMPT_TOKEN_S
    step_s = STEP_S + PLACES * ROW_S
    capacity = PLACES / (TOKENS * step_s + PLACES * prompt_s)
    short = poisson(1.5 * capacity, 60, seed=seed, patience_s=5.0)
    long = poisson(
        0.5 * capacity, 60, seed=seed + 100, patience_s=5.0, num_prompt_tokens=long_prompt
    )
    engine = variant.engine()
    engine.run(short + long, 60)
    return {"long prompts": whole_between(engine, 15, 60) * CAPACITY / capacity}


def slow(variant: Variant, seed: int) -> dict[str, float]:
    """A full batch answers after 5.4 s, and clients leave after 5 s."""
    engine = variant.engine(step_s=0.06)
    engine.run(poisson(20, 60, seed=seed, patience_s=5.0, num_tokens=48), 60)
    # The largest batch that answers in four fifths of 5 s.
    return {"slow engine": whole_between(engine, 20, 60) * CAPACITY / (32 / 4.0)}


def hopeless(variant: Variant, seed: int) -> dict[str, float]:
    """Of twenty clients nineteen leave before any batch could answer: what the twentieth gets."""
    engine = variant.engine()
    impatient = poisson(1.9 * CAPACITY, 30, seed=seed, patience_s=0.5)
    patient = poisson(0.1 * CAPACITY, 30, seed=seed + 100, patience_s=20.0)
    engine.run(impatient + patient, 40)

    entries = {request.entry for request in patient}
    ends = [end for end in engine.ends if end.entry in entries]
    return {"the few who wait": num_of(WHOLE, ends) / len(patient)}


def dip(variant: Variant, seed: int) -> dict[str, float]:
    """The engine takes four times as long for 5 s."""
    engine = variant.engine(step_s=0.06)
    engine.slow_from_s = 15.0
    engine.slow_until_s = 20.0
    engine.run(poisson(40, 50, seed=seed, patience_s=5.0), 50)

    step_s = 0.06 + PLACES * ROW_S
    answers_per_s = whole_between(engine, 22, 50) * CAPACITY
    return {"after a slow moment": answers_per_s * TOKENS * step_s / PLACES}


def first_tokens(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity, of clients who leave if no token comes for 2 s."""
    engine = variant.engine()
    num_tokens = 8 * TOKENS
    arrivals = poisson(
        2 * CAPACITY / 8, 60, seed=seed, first_s=2.0, num_tokens=num_tokens, max_tokens=num_tokens
    )
    engine.run(arrivals, 60)

    ends = [end for end in engine.ends if end.at_s > 15]
    counted = [request for request in arrivals if request.at_s > 15]
    return {"left without a token": num_of(LEFT, ends) / len(counted)}


def deadlines(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity of patient clients, of which half have deadlines of 2.3 s: a full engine
    takes 2.1 s for an answer.
    """
    engine = variant.engine()
    arrivals = poisson(2 * CAPACITY, 30, seed=seed)
    for request in arrivals[::2]:
        request.entry.deadline_s = request.at_s + 2.3

    engine.run(arrivals, 40)

    ends = arrived_after(10, engine)
    return {
        "goodput with deadlines": whole_between(engine, 10, 30),
        "ended by a deadline": num_of(LATE, ends) / len(ends),
    }


def burst(variant: Variant, seed: int) -> dict[str, float]:
    """Ten seconds of work at once beside four fifths of the capacity."""
    engine = variant.engine()
    num_at_once = int(10 * CAPACITY)
    at_once = [arrival(10.0, patience_s=5.0) for _ in range(num_at_once)]
    steady = poisson(0.8 * CAPACITY, 40, seed=seed, patience_s=5.0)
    engine.run(at_once + steady, 40)

    ends = [end for end in arrived_after(10.01, engine) if end.entry.arrived_s < 20]
    return {"after a burst": num_of(WHOLE, ends) / len(ends)}


def patient(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity, of clients who never leave: how long those wait who were let in."""
    engine = variant.engine()
    engine.run(poisson(2 * CAPACITY, 40, seed=seed), 40)

    waits_s: list[float] = []
    for entry, wait_s in engine.first_s.items():
        if entry.arrived_s > 15:
            waits_s.append(wait_s)

    waits_s.sort()
    ends = [end for end in engine.ends if end.at_s > 15]
    return {
        "wait of who is let in, p99, s": waits_s[int(0.99 * len(waits_s))],
        "let in, refused later": num_of(LATE, ends) / max(1, len(waits_s)),
    }


def long_queue(variant: Variant, seed: int, *, leave: str) -> dict[str, float]:
    """Twice the capacity where all may wait for 10 s, of clients who leave "never", after 5 s
    "early", or after 2 s "without a token".
    """
    patience: dict[str, dict[str, float]] = {
        "never": {},
        "early": {"patience_s": 5.0},
        "without a token": {"first_s": 2.0},
    }
    engine = without_short_queue(variant).engine()
    engine.run(poisson(2 * CAPACITY, 40, seed=seed, **patience[leave]), 40)

    ends = arrived_after(15, engine)
    num_let_in = len(ends) - num_of(REFUSED, ends)
    title = f"long queue, clients leave {leave}"
    return {
        f"{title}: goodput": whole_between(engine, 15, 40),
        f"{title}: let in for nothing": 1 - num_of(WHOLE, ends) / num_let_in,
    }


def after_some_left(variant: Variant, seed: int, *, num_left: int) -> dict[str, float]:
    """At the start so many clients leave together without a token; later 100 patient ones come at
    once: how many of these are let in.
    """
    engine = variant.engine()
    full_batch = [arrival(0.0, num_tokens=60) for _ in range(PLACES)]
    leaving: list[Arrival] = []
    for number in range(num_left):
        leaving.append(arrival(0.5 + 0.001 * number, first_s=0.5))

    steady = poisson(0.5 * CAPACITY, 25, seed=seed)
    later_ones = [request for request in steady if request.at_s > 5]
    crowd = [arrival(20.0) for _ in range(100)]
    engine.run(full_batch + leaving + later_ones + crowd, 30)

    entries = {request.entry for request in crowd}
    ends = [end for end in engine.ends if end.entry in entries]
    return {f"a crowd after {num_left} left: let in": 1 - num_of(REFUSED, ends) / len(crowd)}


def long_prompts_beside(variant: Variant, seed: int) -> dict[str, float]:
    """Two clients with more than the engine can do, one of them with prompts 40 times as long: the
    share of the engine's time that the one with less has, of a half.
    """
    long_prompt = 40 * PROMPT
    engine = variant.engine()
    short = poisson(2 * CAPACITY, 30, seed=seed, client="short")
    long = poisson(CAPACITY, 30, seed=seed + 100, client="long", num_prompt_tokens=long_prompt)
    engine.run(short + long, 30)

    answer_s = TOKENS * (STEP_S / PLACES + ROW_S)
    seconds = {"short": 0.0, "long": 0.0}
    for end in engine.ends:
        if end.outcome == WHOLE and end.at_s > 10:
            prompt_s = end.entry.num_prompt_tokens * PROMPT_TOKEN_S
            seconds[end.entry.client] += answer_s + prompt_s

    return {"beside long prompts": 2 * min(seconds.values()) / sum(seconds.values())}


def long_answers(variant: Variant, seed: int) -> dict[str, float]:
    """A full batch begins at once and takes 26 s; others come meanwhile and may wait for 10 s."""
    engine = without_short_queue(variant).engine()
    full_batch = [arrival(0.0, num_tokens=400) for _ in range(PLACES)]
    later_ones = poisson(2.0, 10, seed=seed, num_tokens=400)
    engine.run(full_batch + later_ones, 30)

    num_late = num_of(LATE, engine.ends)
    num_not_answered = num_late + num_of(REFUSED, engine.ends)
    return {"long answers: refused late": num_late / max(1, num_not_answered)}


def later(variant: Variant, seed: int) -> dict[str, float]:
    """Clients who leave after 2 s, and an hour later others who wait for 8 s."""
    engine = variant.engine()
    impatient = poisson(2 * CAPACITY, 30, seed=seed, patience_s=2.0)
    patient = poisson(CAPACITY, 20, seed=seed + 100, patience_s=8.0, num_tokens=2 * TOKENS)
    for request in patient:
        request.at_s += 3600.0
        request.entry.arrived_s += 3600.0

    engine.run(impatient + patient, 3600.0 + 30)

    num_whole = num_of(WHOLE, arrived_after(3000, engine))
    return {"an hour later": num_whole / (20 * CAPACITY / 2)}


def beside_hogs(variant: Variant, seed: int) -> dict[str, float]:
    """A client that asks for 8 tokens now and then, beside two bodies of 512 long answers each."""
    engine = variant.engine()
    light: list[Arrival] = []
    for number in range(20):
        light.append(arrival(2.0 + number + 0.01 * seed, "light", num_tokens=8))

    hogs = hog("hog 0", 0.0, 4) + hog("hog 1", 1.9, 4)
    engine.run(hogs + light, 30)

    waits_s: list[float] = []
    for request in light:
        # One that has no token waits until the end.
        waits_s.append(engine.first_s.get(request.entry, 30 - request.at_s))

    return {"a light client's wait, s": statistics.median(waits_s)}


def expressed(variant: Variant, seed: int) -> dict[str, float]:
    """One client has twice the capacity and leaves after 4 s; beside it a hundred ask for 8 tokens,
    20 times a second.
    """
    engine = variant.engine()
    heavy = poisson(2 * CAPACITY, 40, seed=seed, patience_s=4.0)
    light = poisson(20.0, 40, seed=seed + 100, num_tokens=8, patience_s=5.0)
    for number, request in enumerate(light):
        request.entry.client = f"light {number % 100}"

    engine.run(heavy + light, 40)

    waits_s: list[float] = []
    for request in light:
        if request.at_s > 15:
            # One that has no token leaves after 5 s.
            waits_s.append(engine.first_s.get(request.entry, 5.0))

    ends = [end for end in arrived_after(15, engine) if end.entry.client == "a"]
    num_let_in = len(ends) - num_of(REFUSED, ends)
    return {
        "light clients' wait, s": statistics.mean(waits_s),
        "beside them, let in for nothing": num_of(LEFT, ends) / num_let_in,
    }


def tenants(variant: Variant, seed: int) -> dict[str, float]:
    """Ten clients who come again when they are told, of which one asks ten times as much."""
    engine = variant.engine()
    arrivals = []
    for number in range(10):
        share = 10.0 if number == 0 else 1.0
        load = 2 * CAPACITY * share / 19
        arrivals += poisson(load, 40, seed=seed * 10 + number, client=f"key {number}")

    engine.run(arrivals, 40)

    answers = {f"key {number}": 0 for number in range(10)}
    for end in engine.ends:
        if end.outcome == WHOLE and end.at_s > 15:
            answers[end.entry.client] += 1

    # What each of the nine has asked for in 25 s.
    num_asked = 25 * 2 * CAPACITY / 19
    least = min(answers.values())
    return {"the least of ten keys": min(1.0, least / num_asked)}


def again(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity for 10 s, of clients who come again when they are told."""
    engine = variant.engine()
    arrivals = poisson(2 * CAPACITY, 10, seed=seed, comes_again=True)
    engine.run(arrivals, 40)

    num_whole = num_of(WHOLE, engine.ends)
    num_refusals = sum(request.num_refused for request in arrivals)
    return {
        "refusals to an answer": num_refusals / max(1, num_whole),
        "answered after 40 s": num_whole / len(arrivals),
    }


# The scenes that each part is made for; `--all` measures all.
MADE_FOR: dict[str, tuple[Callable[..., dict[str, float]], ...]] = {
    "short": (lasting, mixed, patient),
    "wait": (long_queue,),
    "deadline": (deadlines,),
    "first": (long_queue,),
    "patience": (long_queue,),
    "lateness": (deadlines,),
    "next-end": (long_answers,),
    "turns": (tenants,),
    "prompts": (long_prompts_beside, deadlines),
    "memory": (mixed, dip),
    "forget": (later,),
    "instant": (after_some_left,),
    "stayed": (after_some_left,),
    "part": (mixed, slow, dip),
    "batch": (mixed, slow, dip),
    "least-step": (hopeless,),
    "long-steps": (mixed, slow),
    "express": (beside_hogs, expressed),
    "short-steps": (expressed,),
    "retry-after": (again,),
}
SCENES: tuple[Scene, ...] = (
    partial(lasting, load=1),
    partial(lasting, load=2),
    partial(lasting, load=4),
    mixed,
    slow,
    hopeless,
    dip,
    first_tokens,
    deadlines,
    burst,
    patient,
    partial(long_queue, leave="never"),
    partial(long_queue, leave="early"),
    partial(long_queue, leave="without a token"),
    partial(after_some_left, num_left=1),
    partial(after_some_left, num_left=40),
    long_prompts_beside,
    long_answers,
    later,
    beside_hogs,
    expressed,
    tenants,
    again,
)


def whole_between(engine: Engine, from_s: float, to_s: float) -> float:
    """Return the whole answers a second in a time, over the capacity."""
    ends = [end for end in engine.ends if from_s <= end.at_s < to_s]
    return num_of(WHOLE, ends) / (to_s - from_s) / CAPACITY


def num_of(outcome: str, ends: Iterable[End]) -> int:
    """Return how many requests ended so."""
    return sum(end.outcome == outcome for end in ends)


def arrived_after(time_s: float, engine: Engine) -> list[End]:
    """Return the ends of the requests that came after a time."""
    return [end for end in engine.ends if end.entry.arrived_s > time_s]


def without_short_queue(variant: Variant) -> Variant:
    """Return the variant with a queue in which all may wait for MAX_WAIT_S."""
    return replace(variant, options={**variant.options, "keeps_short": False})


@contextmanager
def replaced(names: Mapping[str, Any]) -> Iterator[None]:
    """Put other things under some names of MODULES for a while."""
    before = {name: getattr(module_of(name), name) for name in names}
    try:
        for name, value in names.items():
            setattr(module_of(name), name, value)

        yield
    finally:
        for name, value in before.items():
            setattr(module_of(name), name, value)


def module_of(name: str) -> ModuleType:
    """Return the module that defines a name."""
    [module] = [module for module in MODULES if hasattr(module, name)]
    return module


def scenes_of(name: str) -> list[Scene]:
    """Return the scenes of MADE_FOR of a part, or all for the whole queue."""
    if name not in MADE_FOR:
        return list(SCENES)

    scenes: list[Scene] = []
    for scene in SCENES:
        function = getattr(scene, "func", scene)
        if function in MADE_FOR[name]:
            scenes.append(scene)

    return scenes


def measured(variant: Variant, num_seeds: int, scenes: Iterable[Scene] | None = None) -> Figures:
    """Return the figures of a variant in these scenes, or in all."""
    figures: Figures = {}
    with replaced(variant.names):
        for scene in scenes or SCENES:
            for seed in range(1, num_seeds + 1):
                for name, value in scene(variant, seed).items():
                    figures.setdefault(name, []).append(value)

    return figures


def moves(whole: Figures, part: Figures) -> Iterator[str]:
    """Each figure that a missing part moves, with its mean before and after."""
    for name, before in whole.items():
        after = part.get(name, before)
        if is_moved(before, after):
            yield f"{name} {statistics.mean(before):.2f} → {statistics.mean(after):.2f}"


def is_moved(before: list[float], after: list[float]) -> bool:
    """Whether the mean differs by more than chance, and by more than LEAST_MOVE."""
    differences = [later - earlier for earlier, later in zip(before, after, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(statistics.mean(differences)) > max(NOISE * error, LEAST_MOVE)


def table(figures_of: Mapping[str, Figures]) -> str:
    """Return a row for each part that was measured."""
    rows = []
    for name, variant in VARIANTS.items():
        if name in figures_of and name != "whole":
            moved = "; ".join(moves(figures_of["whole"], figures_of[name]))
            rows.append([variant.title, moved or "nothing"])

    return markdown(["without", "what moves"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        "scripts/overload ablation", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    parser.add_argument("--all", action="store_true", help="measure each part in all scenes")
    parser.add_argument("--seeds", type=int, default=8, help="of arrivals")
    parser.add_argument("--only", help=f"names, with commas between: {', '.join(VARIANTS)}")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(VARIANTS)
    unknown = set(names) - set(VARIANTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    figures_of: dict[str, Figures] = {}
    if arguments.only and RESULTS.exists():
        figures_of = json.loads(RESULTS.read_text())

    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    variants = [VARIANTS[name] for name in names]
    scenes = [list(SCENES) if arguments.all else scenes_of(name) for name in names]
    with ProcessPoolExecutor(max_workers=2) as pool:
        results = pool.map(measured, variants, repeat(arguments.seeds), scenes)
        for name, figures in zip(names, results, strict=True):
            figures_of[name] = figures
            RESULTS.write_text(json.dumps(figures_of) + "\n")
            print(name, *moves(figures_of["whole"], figures), sep="\n  ", flush=True)

    means = {}
    for figure, values in figures_of["whole"].items():
        means[figure] = round(statistics.mean(values), 2)

    text = table(figures_of)
    print(f"{text}\n\n{means}")
    if arguments.write:
        write(text, MARKS, ROOT / PAGE)


if __name__ == "__main__":
    main()
