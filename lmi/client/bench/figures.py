"""The figures of a load: percentiles, rates, errors by outcome, goodput; as one object for JSON,
and as a table.

Times are in seconds.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmi.client.bench.load import Load, Sample

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
Json = dict[str, Any]
LATENCIES = {"first_s": "time to first token", "gap_s": "between tokens", "end_s": "end to end"}
RATES = {
    "tokens_per_s": "tokens/s",
    "requests_per_s": "answers/s",
    "goodput_per_s": "goodput, answers/s",
}
COUNTS = {"num_requests": "requests", "num_ok": "whole answers", "num_tokens": "output tokens"}


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed; NaN if there is
    none.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}

    return {"mean": statistics.fmean(values)} | {
        name: quantile(values, share) for name, share in SHARES.items()
    }


def figures_of(rounds: Sequence[Sequence[Sample]], targets: Mapping[str, float]) -> Json:
    """Return the figures of some rounds. The time between them does not count. Raises ValueError if
    one is empty.

    `targets` has the latencies that no good answer exceeds, by name; of its gaps the mean counts.
    Latencies are those of whole answers: mean, p50, p90, p99. `outcomes` counts requests by status,
    or why they have no whole answer. `counted_by` is usage, events, both, or nothing: the server
    does not report its tokens.
    """
    samples = [sample for one in rounds for sample in one]
    good = [sample for sample in samples if sample.is_ok]
    seconds = sum(
        max(one.end_s for one in part) - min(one.due_s for one in part) for part in rounds
    )
    num_tokens = sum(sample.num_tokens for sample in good)
    counted_by = {
        "events" if sample.num_reported is None else "usage"
        for sample in good
        if sample.times_s or sample.num_reported is not None
    }
    return {
        "num_requests": len(samples),
        "num_ok": len(good),
        "outcomes": dict(sorted(Counter(sample.outcome for sample in samples).items())),
        "seconds": seconds,
        "num_tokens": num_tokens,
        "counted_by": " and ".join(sorted(counted_by)) or "nothing",
        "tokens_per_s": num_tokens / seconds,
        "requests_per_s": len(good) / seconds,
        "goodput_per_s": sum(_is_within(targets, sample) for sample in good) / seconds,
        **{
            name: summary([value for sample in good for value in sample.latencies_s[name]])
            for name in LATENCIES
        },
    }


def _is_within(targets: Mapping[str, float], sample: Sample) -> bool:
    seen = sample.latencies_s
    return all(
        not seen[name] or statistics.fmean(seen[name]) <= most for name, most in targets.items()
    )


def report_of(settings: Json, servers: Sequence[Load], targets: Mapping[str, float]) -> Json:
    """Return settings, the figures of each server, of all rounds and of each, and the ratios of two
    servers.

    A ratio is the median over the rounds of the second server's figure by the first one's; None
    where one has none.
    """
    found: list[Json] = [
        {
            "url": server.url,
            "total": figures_of(server.rounds, targets),
            "rounds": [figures_of([one], targets) for one in server.rounds],
            "cpu_s": server.cpu_s,
            "samples": server.rounds,
        }
        for server in servers
    ]
    report: Json = {"settings": settings, "servers": found}
    return (
        report | {"ratios": _ratios(*(one["rounds"] for one in found))}
        if len(found) == 2
        else report
    )


def _ratios(first: list[Json], second: list[Json]) -> dict[str, float | None]:
    pairs = list(zip(map(_flat, first), map(_flat, second), strict=True))
    ratios = {}
    for name in pairs[0][0]:
        found = [other[name] / one[name] for one, other in pairs if one.get(name) and name in other]
        ratios[name] = statistics.median(found) if found else None

    return ratios


def _flat(figures: Json) -> dict[str, float]:
    """Return rates by name, and latencies by names such as `first_s.p50`."""
    latencies = {
        f"{name}.{part}": value for name in LATENCIES for part, value in figures[name].items()
    }
    return {name: figures[name] for name in RATES} | latencies


def rows_of(report: Json) -> list[list[str]]:
    """Return a table of texts: a head, then a row for each figure, with a column for each server
    and one of ratios.
    """
    totals = [server["total"] for server in report["servers"]]
    ratios = report.get("ratios")
    heads = ["", *(server["url"] for server in report["servers"]), *(["ratio"] if ratios else [])]
    rows = [heads]

    def add(label: str, cells: list[str], ratio: float | None = None) -> None:
        shown = [] if ratios is None else ["" if ratio is None else f"{ratio:.2f}"]
        rows.append([label, *cells, *shown])

    for name, label in COUNTS.items():
        add(label, [str(total[name]) for total in totals])

    add("tokens counted by", [total["counted_by"] for total in totals])
    for outcome in sorted({one for total in totals for one in total["outcomes"]} - {"200"}):
        add(f"failed: {outcome}", [str(total["outcomes"].get(outcome, 0)) for total in totals])

    for name, label in RATES.items():
        add(label, [f"{total[name]:.1f}" for total in totals], (ratios or {}).get(name))

    for name, label in LATENCIES.items():
        for part in ("mean", "p50", "p90", "p99"):
            cells = [f"{total[name][part] * 1e3:.1f}" if total[name] else "-" for total in totals]
            add(f"{label}, {part}, ms", cells, (ratios or {}).get(f"{name}.{part}"))

    add(
        "CPU of the server, s",
        [f"{sum(s['cpu_s'].values()):.2f}" if s["cpu_s"] else "-" for s in report["servers"]],
    )
    return rows


def table_of(report: Json) -> str:
    """Return the table as text, and the CPU of each process below it."""
    rows = rows_of(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    for server in report["servers"]:
        lines += [
            f"CPU of {server['url']}: {name} {used_s:.2f} s"
            for name, used_s in sorted(server["cpu_s"].items())
        ]

    return "\n".join(lines)
