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
from collections import Counter
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
    PLACES,
    PROMPT,
    PROMPT_TOKEN_S,
    ROW_S,
    STEP_S,
    TOKENS,
    Engine,
    arrival,
    hog,
    poisson,
)
from scripts.benchmarks.table import PAGE, ROOT, markdown, write

MARKS = "<!-- ablation figures -->", "<!-- end of ablation figures -->"
NOISE = 3.0
LEAST_MOVE = 0.01
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
    """The batch is reduced also where no batch could answer in time."""

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
    """Of twenty clients nineteen leave before any batch could answer: what the others get."""
    engine = variant.engine()
    impatient = poisson(1.9 * CAPACITY, 30, seed=seed, patience_s=0.5)
    patient = poisson(0.1 * CAPACITY, 30, seed=seed + 100, patience_s=20.0)
    engine.run(impatient + patient, 40)
    of_patient = {one.entry for one in patient}
    ends = [end for end, entry, _ in engine.ends if entry in of_patient]
    return {"the few who wait": ends.count("whole") / len(patient)}


def dip(variant: Variant, seed: int) -> dict[str, float]:
    """The engine takes four times as long for 5 s."""
    engine = variant.engine(step_s=0.06)
    engine.slow_s = 15.0, 20.0
    engine.run(poisson(40, 50, seed=seed, patience_s=5.0), 50)
    step_s = 0.06 + PLACES * ROW_S
    return {
        "after a slow moment": whole_between(engine, 22, 50) * CAPACITY * TOKENS * step_s / PLACES
    }


def first_tokens(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity, of clients who leave if no token comes for 2 s."""
    engine = variant.engine()
    arrivals = poisson(
        2 * CAPACITY / 8, 60, seed=seed, first_s=2.0, num_tokens=8 * TOKENS, max_tokens=8 * TOKENS
    )
    engine.run(arrivals, 60)
    num_left = sum(end == "left" for end, _, at_s in engine.ends if at_s > 15)
    return {"left without a token": num_left / sum(one.at_s > 15 for one in arrivals)}


def deadlines(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity of patient clients, of which half have deadlines of 2.3 s: a full engine
    takes 2.1 s for an answer.
    """
    engine = variant.engine()
    arrivals = poisson(2 * CAPACITY, 30, seed=seed)
    for one in arrivals[::2]:
        one.entry.deadline_s = one.at_s + 2.3

    engine.run(arrivals, 40)
    ends = [end for end, entry, _ in engine.ends if entry.arrived_s > 10]
    return {
        "goodput with deadlines": whole_between(engine, 10, 30),
        "ended by a deadline": ends.count("late") / len(ends),
    }


def burst(variant: Variant, seed: int) -> dict[str, float]:
    """Ten seconds of work at once beside four fifths of the capacity."""
    engine = variant.engine()
    at_once = [arrival(10.0, patience_s=5.0) for _ in range(int(10 * CAPACITY))]
    engine.run(at_once + poisson(0.8 * CAPACITY, 40, seed=seed, patience_s=5.0), 40)
    ends = [(end, entry) for end, entry, _ in engine.ends if 10.01 < entry.arrived_s < 20]
    return {"after a burst": sum(end == "whole" for end, _ in ends) / len(ends)}


def patient(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity, of clients who never leave: how long those wait who were let in."""
    engine = variant.engine()
    engine.run(poisson(2 * CAPACITY, 40, seed=seed), 40)
    waits_s = sorted(engine.first_s[entry] for entry in engine.first_s if entry.arrived_s > 15)
    num_late = sum(end == "late" for end, _, at_s in engine.ends if at_s > 15)
    return {
        "wait of who is let in, p99, s": waits_s[int(0.99 * len(waits_s))],
        "let in, refused later": num_late / max(1, len(waits_s)),
    }


def long_queue(variant: Variant, seed: int, *, leave: str) -> dict[str, float]:
    """Twice the capacity where all may wait for 10 s, of clients who leave "never", after 5 s
    "early", or after 2 s "without a token".
    """
    more = {"never": {}, "early": {"patience_s": 5.0}, "without a token": {"first_s": 2.0}}
    options = {**variant.options, "keeps_short": False}
    engine = replace(variant, options=options).engine()
    engine.run(poisson(2 * CAPACITY, 40, seed=seed, **more[leave]), 40)
    ends = Counter(end for end, entry, _ in engine.ends if entry.arrived_s > 15)
    num_let_in = ends.total() - ends["refused"]
    return {
        f"long queue, clients leave {leave}: goodput": whole_between(engine, 15, 40),
        f"long queue, clients leave {leave}: let in for nothing": 1 - ends["whole"] / num_let_in,
    }


def after_some_left(variant: Variant, seed: int, *, num_left: int) -> dict[str, float]:
    """At the start so many clients leave together without a token; later 100 patient ones come at
    once. Of them so many are let in.
    """
    engine = variant.engine()
    full = [arrival(0.0, num_tokens=60) for _ in range(PLACES)]
    gone = [arrival(0.5 + 0.001 * i, first_s=0.5) for i in range(num_left)]
    others = [one for one in poisson(0.5 * CAPACITY, 25, seed=seed) if one.at_s > 5]
    at_once = [arrival(20.0) for _ in range(100)]
    engine.run(full + gone + others + at_once, 30)

    crowd = {one.entry for one in at_once}
    num_refused = sum(end == "refused" and entry in crowd for end, entry, _ in engine.ends)
    return {f"a crowd after {num_left} left: let in": 1 - num_refused / len(crowd)}


def long_prompts_beside(variant: Variant, seed: int) -> dict[str, float]:
    """Two clients with more than the engine can do, one of them with prompts 40 times as long: the
    lesser part of the engine's time that one of them has, of a half.
    """
    long_prompt = 40 * PROMPT
    engine = variant.engine()
    short = poisson(2 * CAPACITY, 30, seed=seed, client="short")
    long = poisson(CAPACITY, 30, seed=seed + 100, client="long", num_prompt_tokens=long_prompt)
    engine.run(short + long, 30)

    answer_s = TOKENS * (STEP_S / PLACES + ROW_S)
    seconds = {"short": 0.0, "long": 0.0}
    for end, entry, at_s in engine.ends:
        if end == "whole" and at_s > 10:
            seconds[entry.client] += answer_s + entry.num_prompt_tokens * PROMPT_TOKEN_S

    return {"beside long prompts": 2 * min(seconds.values()) / sum(seconds.values())}


def long_answers(variant: Variant, seed: int) -> dict[str, float]:
    """A full batch begins at once and takes 26 s; others come meanwhile and may wait for 10 s."""
    engine = replace(variant, options={**variant.options, "keeps_short": False}).engine()
    first = [arrival(0.0, num_tokens=400) for _ in range(PLACES)]
    engine.run(first + poisson(2.0, 10, seed=seed, num_tokens=400), 30)
    num_refused_late = sum(end == "late" for end, _, _ in engine.ends)
    num_refused = sum(end == "refused" for end, _, _ in engine.ends)
    return {"long answers: refused late": num_refused_late / max(1, num_refused + num_refused_late)}


def later(variant: Variant, seed: int) -> dict[str, float]:
    """Clients who leave after 2 s, and an hour later others who wait for 8 s."""
    engine = variant.engine()
    impatient = poisson(2 * CAPACITY, 30, seed=seed, patience_s=2.0)
    others = poisson(CAPACITY, 20, seed=seed + 100, patience_s=8.0, num_tokens=2 * TOKENS)
    for one in others:
        one.at_s += 3600.0
        one.entry.arrived_s += 3600.0

    engine.run(impatient + others, 3600.0 + 30)
    num_whole = sum(end == "whole" for end, entry, _ in engine.ends if entry.arrived_s > 3000)
    return {"an hour later": num_whole / (20 * CAPACITY / 2)}


def beside_hogs(variant: Variant, seed: int) -> dict[str, float]:
    """A client that asks for 8 tokens now and then, beside two bodies of 512 long answers each."""
    engine = variant.engine()
    light = [arrival(2.0 + i + 0.01 * seed, "light", num_tokens=8) for i in range(20)]
    engine.run(hog("hog 0", 0.0, 4) + hog("hog 1", 1.9, 4) + light, 30)
    waits_s = [engine.first_s.get(one.entry, 30 - one.at_s) for one in light]
    return {"a light client's wait, s": statistics.median(waits_s)}


def expressed(variant: Variant, seed: int) -> dict[str, float]:
    """One client has twice the capacity and leaves after 4 s; beside it a hundred ask for 8 tokens,
    20 times a second.
    """
    engine = variant.engine()
    heavy = poisson(2 * CAPACITY, 40, seed=seed, patience_s=4.0)
    light = poisson(20.0, 40, seed=seed + 100, num_tokens=8, patience_s=5.0)
    for number, one in enumerate(light):
        one.entry.client = f"light {number % 100}"

    engine.run(heavy + light, 40)
    of_heavy = [
        end for end, entry, _ in engine.ends if entry.client == "a" and entry.arrived_s > 15
    ]
    num_let_in = len(of_heavy) - of_heavy.count("refused")
    waits_s = [engine.first_s.get(one.entry, 5.0) for one in light if one.at_s > 15]
    return {
        "light clients' wait, s": statistics.mean(waits_s),
        "beside them, let in for nothing": of_heavy.count("left") / num_let_in,
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
    tokens = dict.fromkeys((f"key {number}" for number in range(10)), 0)
    for end, entry, at_s in engine.ends:
        if end == "whole" and at_s > 15:
            tokens[entry.client] += 1

    wanted = 25 * 2 * CAPACITY / 19
    return {"the least of ten keys": min(min(1.0, count / wanted) for count in tokens.values())}


def again(variant: Variant, seed: int) -> dict[str, float]:
    """Twice the capacity for 10 s, of clients who come again when they are told."""
    engine = variant.engine()
    arrivals = poisson(2 * CAPACITY, 10, seed=seed, comes_again=True)
    engine.run(arrivals, 40)
    num_whole = sum(end == "whole" for end, _, _ in engine.ends)
    return {
        "refusals to an answer": sum(one.num_refused for one in arrivals) / max(1, num_whole),
        "answered after 40 s": num_whole / len(arrivals),
    }


# The scenes that each part is made for; `--all` measures all.
MADE_FOR = {
    "short": "lasting, mixed, patient",
    "wait": "long_queue",
    "deadline": "deadlines",
    "first": "long_queue",
    "patience": "long_queue",
    "lateness": "deadlines",
    "next-end": "long_answers",
    "turns": "tenants",
    "prompts": "long_prompts_beside, deadlines",
    "memory": "mixed, dip",
    "forget": "later",
    "instant": "after_some_left",
    "stayed": "after_some_left",
    "part": "mixed, slow, dip",
    "batch": "mixed, slow, dip",
    "least-step": "hopeless",
    "long-steps": "mixed, slow",
    "express": "beside_hogs, expressed",
    "short-steps": "expressed",
    "retry-after": "again",
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
    """Whole answers in a second, of the capacity."""
    num_whole = sum(end == "whole" and from_s <= at_s < to_s for end, _, at_s in engine.ends)
    return num_whole / (to_s - from_s) / CAPACITY


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
    """The scenes of MADE_FOR of a part, all for the whole queue."""
    if name not in MADE_FOR:
        return list(SCENES)

    names = MADE_FOR[name].split(", ")
    return [scene for scene in SCENES if getattr(scene, "func", scene).__name__ in names]


def measured(variant: Variant, num_seeds: int, scenes: Iterable[Scene] | None = None) -> Figures:
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
    differences = [later - earlier for earlier, later in zip(before, after, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(statistics.mean(differences)) > max(NOISE * error, LEAST_MOVE)


def table(found: Mapping[str, Figures]) -> str:
    whole = found["whole"]
    rows = []
    for name, variant in VARIANTS.items():
        if name in found and name != "whole":
            rows.append([variant.title, "; ".join(moves(whole, found[name])) or "nothing"])

    return markdown(["without", "what moves"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        "scripts/overload ablation", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    parser.add_argument("--all", action="store_true", help="measure each part in all scenes")
    parser.add_argument("--seeds", type=int, default=8, help="of arrivals")
    parser.add_argument("--only", help=f"names, with commas between: {', '.join(VARIANTS)}")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(VARIANTS)
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    found = json.loads(RESULTS.read_text()) if given.only and RESULTS.exists() else {}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        variants = [VARIANTS[name] for name in names]
        scenes = [list(SCENES) if given.all else scenes_of(name) for name in names]
        results = pool.map(measured, variants, repeat(given.seeds), scenes)
        for name, figures in zip(names, results, strict=True):
            found[name] = figures
            RESULTS.write_text(json.dumps(found) + "\n")
            print(name, *moves(found["whole"], figures), sep="\n  ", flush=True)

    means = {name: round(statistics.mean(values), 2) for name, values in found["whole"].items()}
    print(f"{table(found)}\n\n{means}")
    if given.write:
        write(table(found), MARKS, ROOT / PAGE)


if __name__ == "__main__":
    main()
