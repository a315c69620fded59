"""The figures of a load: percentiles, rates, errors by outcome, goodput. Times are in seconds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmi.client.bench.load import Sample

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Targets:
    """Latencies that a good answer does not exceed, in seconds. None: any is good."""

    first_s: float | None = None
    gap_s: float | None = None  # the mean of an answer
    end_s: float | None = None

    def hold(self, sample: Sample) -> bool:
        gaps_s = gaps_of(sample)
        pairs = (
            (first_of(sample), self.first_s),
            (statistics.fmean(gaps_s) if gaps_s else None, self.gap_s),
            (sample.end_s - sample.due_s, self.end_s),
        )
        return sample.is_ok and all(seen is None or most is None or seen <= most for seen, most in pairs)


@dataclass(frozen=True)
class Figures:
    """What some requests of one server came to. Latencies are those of whole answers: mean, p50, p90, p99."""

    num_requests: int
    num_ok: int
    outcomes: dict[str, int]  # number of requests by status, or why they have no whole answer
    seconds: float
    num_tokens: int
    counted_by: str  # usage, events, both, or nothing: the server does not report it
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    first_s: dict[str, float]
    gap_s: dict[str, float]
    end_s: dict[str, float]


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed; NaN if there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def first_of(sample: Sample) -> float | None:
    return sample.times_s[0] - sample.due_s if sample.times_s else None


def gaps_of(sample: Sample) -> list[float]:
    return [after - before for before, after in itertools.pairwise(sample.times_s)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles; nothing of no values."""
    if not values:
        return {}
    return {"mean": statistics.fmean(values)} | {name: quantile(values, share) for name, share in SHARES.items()}


def figures_of(rounds: Sequence[Sequence[Sample]], targets: Targets) -> Figures:
    """Return the figures of some rounds. The time between them does not count. Raises ValueError if one is empty."""
    samples = [sample for one in rounds for sample in one]
    good = [sample for sample in samples if sample.is_ok]
    seconds = sum(max(one.end_s for one in part) - min(one.due_s for one in part) for part in rounds)
    num_tokens = sum(sample.num_tokens for sample in good)
    counted_by = {
        "events" if sample.num_reported is None else "usage"
        for sample in good
        if sample.times_s or sample.num_reported is not None
    }
    return Figures(
        num_requests=len(samples),
        num_ok=len(good),
        outcomes=dict(sorted(Counter(sample.outcome for sample in samples).items())),
        seconds=seconds,
        num_tokens=num_tokens,
        counted_by=" and ".join(sorted(counted_by)) or "nothing",
        tokens_per_s=num_tokens / seconds,
        requests_per_s=len(good) / seconds,
        goodput_per_s=sum(map(targets.hold, samples)) / seconds,
        first_s=summary([first for sample in good if (first := first_of(sample)) is not None]),
        gap_s=summary([gap for sample in good for gap in gaps_of(sample)]),
        end_s=summary([sample.end_s - sample.due_s for sample in good]),
    )
