"""The figures of a load as one object for JSON: percentiles, rates, errors by outcome, goodput.

Times are in seconds.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmi.client.bench.load import Load, Sample

Json = dict[str, Any]
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Figures by their names, with the words for people.
LATENCIES = {"first_s": "time to first token", "gap_s": "between tokens", "end_s": "end to end"}
RATES = {
    "tokens_per_s": "tokens/s",
    "requests_per_s": "answers/s",
    "goodput_per_s": "goodput, answers/s",
}


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed; NaN if there is
    none.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan

    rank = math.ceil(share * len(ordered))
    return ordered[max(0, rank - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the percentiles of values, {} without any."""
    if not values:
        return {}

    figures = {"mean": statistics.fmean(values)}
    for name, share in SHARES.items():
        figures[name] = quantile(values, share)

    return figures


def figures_of(rounds: Sequence[Sequence[Sample]], targets: Mapping[str, float]) -> Json:
    """Return the figures of some rounds. The time between them does not count. Raises ValueError if
    one is empty.

    `targets` has the latencies that no good answer exceeds, by name; of its gaps the mean counts.
    Latencies are those of whole answers: mean, p50, p90, p99. `outcomes` counts requests by status,
    or why they have no whole answer. `counted_by` is usage, events, both, or nothing: the server
    does not report its tokens.
    """
    samples: list[Sample] = []
    seconds = 0.0
    for samples_of_round in rounds:
        samples += samples_of_round
        begin_s = min(sample.due_s for sample in samples_of_round)
        end_s = max(sample.end_s for sample in samples_of_round)
        seconds += end_s - begin_s

    whole_answers = [sample for sample in samples if sample.is_ok]
    num_tokens = sum(sample.num_tokens for sample in whole_answers)
    num_good = sum(_is_within(targets, sample) for sample in whole_answers)
    outcomes = Counter(sample.outcome for sample in samples)

    figures: Json = {
        "num_requests": len(samples),
        "num_ok": len(whole_answers),
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": seconds,
        "num_tokens": num_tokens,
        "counted_by": _counted_by(whole_answers),
        "tokens_per_s": num_tokens / seconds,
        "requests_per_s": len(whole_answers) / seconds,
        "goodput_per_s": num_good / seconds,
    }
    for name in LATENCIES:
        values = [value for sample in whole_answers for value in sample.latencies_s[name]]
        figures[name] = summary(values)

    return figures


def _counted_by(whole_answers: Sequence[Sample]) -> str:
    """Return by what the tokens of these answers are counted: usage, events, both, or nothing."""
    means = set[str]()
    for sample in whole_answers:
        if sample.num_reported is not None:
            means.add("usage")
        elif sample.times_s:
            means.add("events")

    return " and ".join(sorted(means)) or "nothing"


def _is_within(targets: Mapping[str, float], sample: Sample) -> bool:
    """Return whether an answer is a good one: no mean of its latencies exceeds its target."""
    latencies_s = sample.latencies_s
    for name, target_s in targets.items():
        values = latencies_s[name]
        if values and statistics.fmean(values) > target_s:
            return False

    return True


def report_of(settings: Json, servers: Sequence[Load], targets: Mapping[str, float]) -> Json:
    """Return settings, the figures of each server, of all rounds and of each, and the ratios of two
    servers.

    A ratio is the median over the rounds of the second server's figure by the first one's; None
    where one has none.
    """
    servers_report: list[Json] = []
    for server in servers:
        servers_report.append(
            {
                "url": server.url,
                "total": figures_of(server.rounds, targets),
                "rounds": [figures_of([samples], targets) for samples in server.rounds],
                "cpu_s": server.cpu_s,
                "samples": server.rounds,
            }
        )

    report: Json = {"settings": settings, "servers": servers_report}
    if len(servers_report) == 2:
        first, second = servers_report
        report["ratios"] = _ratios(first["rounds"], second["rounds"])

    return report


def _ratios(first: list[Json], second: list[Json]) -> dict[str, float | None]:
    """Return the ratios of two servers' figures by name, from the figures of their rounds."""
    rounds_of_first = [_flat(figures) for figures in first]
    rounds_of_second = [_flat(figures) for figures in second]
    ratios: dict[str, float | None] = {}
    for name in rounds_of_first[0]:
        ratios_of_rounds = []
        for figures, other_figures in zip(rounds_of_first, rounds_of_second, strict=True):
            if figures.get(name) and name in other_figures:
                ratios_of_rounds.append(other_figures[name] / figures[name])

        ratios[name] = statistics.median(ratios_of_rounds) if ratios_of_rounds else None

    return ratios


def _flat(figures: Json) -> dict[str, float]:
    """Return rates by name, and latencies by names such as `first_s.p50`."""
    flat = {name: figures[name] for name in RATES}
    for name in LATENCIES:
        for part, value in figures[name].items():
            flat[f"{name}.{part}"] = value

    return flat
