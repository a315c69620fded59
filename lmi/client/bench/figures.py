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
    pairs = list(zip(map(_flat, first), map(_flat, second), strict=True))
    ratios: dict[str, float | None] = {}
    for name in pairs[0][0]:
        ratios_of_rounds = []
        for figures, other_figures in pairs:
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


def rows_of(report: Json) -> list[list[str]]:
    """Return a table of texts: a head, then a row for each figure, with a column for each server
    and one of ratios.
    """
    servers = report["servers"]
    totals = [server["total"] for server in servers]
    ratios = report.get("ratios")
    head = ["", *(server["url"] for server in servers)]
    if ratios is not None:
        head.append("ratio")

    rows = [head]

    def add(label: str, cells: list[str], name: str = "") -> None:
        """Add a row, with the ratio of the figure of this name."""
        row = [label, *cells]
        if ratios is not None:
            ratio = ratios.get(name)
            row.append("" if ratio is None else f"{ratio:.2f}")

        rows.append(row)

    for name, label in COUNTS.items():
        add(label, [str(total[name]) for total in totals])

    add("tokens counted by", [total["counted_by"] for total in totals])
    outcomes = set[str]()
    for total in totals:
        outcomes.update(total["outcomes"])

    for outcome in sorted(outcomes - {"200"}):
        add(f"failed: {outcome}", [str(total["outcomes"].get(outcome, 0)) for total in totals])

    for name, label in RATES.items():
        add(label, [f"{total[name]:.1f}" for total in totals], name)

    for name, label in LATENCIES.items():
        for part in ("mean", "p50", "p90", "p99"):
            cells = [_milliseconds(total[name], part) for total in totals]
            add(f"{label}, {part}, ms", cells, f"{name}.{part}")

    add("CPU of the server, s", [_cpu_seconds(server["cpu_s"]) for server in servers])
    return rows


def _milliseconds(latencies_s: Mapping[str, float], part: str) -> str:
    return f"{latencies_s[part] * 1e3:.1f}" if latencies_s else "-"


def _cpu_seconds(cpu_s: Mapping[str, float]) -> str:
    return f"{sum(cpu_s.values()):.2f}" if cpu_s else "-"


def table_of(report: Json) -> str:
    """Return the table as text, and the CPU of each process below it."""
    rows = rows_of(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())

    for server in report["servers"]:
        for name, used_s in sorted(server["cpu_s"].items()):
            lines.append(f"CPU of {server['url']}: {name} {used_s:.2f} s")

    return "\n".join(lines)
