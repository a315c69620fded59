"""What a run found: one object for JSON, a table for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lmi.client.bench.figures import Figures, Targets, figures_of
from lmi.client.bench.run import Served

Json = dict[str, Any]
LATENCIES = {"first_s": "time to first token", "gap_s": "between tokens", "end_s": "end to end"}
RATES = {"tokens_per_s": "tokens/s", "requests_per_s": "answers/s", "goodput_per_s": "goodput, answers/s"}
COUNTS = {"num_requests": "requests", "num_ok": "whole answers", "num_tokens": "output tokens"}


def report_of(settings: Json, servers: Sequence[Served], targets: Targets) -> Json:
    """Return settings, the figures of each server, of all rounds and of each, and the ratios of two servers.

    A ratio is the median over the rounds of the second server's figure by the first one's; None where one has none.
    """
    parts = [[figures_of([one], targets) for one in server.rounds] for server in servers]
    found = [
        {
            "url": server.url,
            "total": asdict(figures_of(server.rounds, targets)),
            "rounds": list(map(asdict, part)),
            "cpu_s": server.cpu_s,
            "samples": [[asdict(sample) for sample in one] for one in server.rounds],
        }
        for server, part in zip(servers, parts, strict=True)
    ]
    report: Json = {"settings": settings, "servers": found}
    return report | {"ratios": _ratios(*parts)} if len(servers) == 2 else report


def _ratios(first: list[Figures], second: list[Figures]) -> dict[str, float | None]:
    pairs = [(_flat(asdict(one)), _flat(asdict(other))) for one, other in zip(first, second, strict=True)]
    ratios = {}
    for name in _flat(asdict(first[0])):
        found = [other[name] / one[name] for one, other in pairs if one.get(name) and name in other]
        ratios[name] = statistics.median(found) if found else None
    return ratios


def _flat(figures: Json) -> dict[str, float]:
    """Return rates by name, and latencies by names such as `first_s.p50`."""
    latencies = {f"{name}.{part}": value for name in LATENCIES for part, value in figures[name].items()}
    return {name: figures[name] for name in RATES} | latencies


def rows_of(report: Json) -> list[list[str]]:
    """Return a table of texts: a head, then a row for each figure, with a column for each server and one of ratios."""
    totals, ratios = [server["total"] for server in report["servers"]], report.get("ratios")
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
    add("CPU of the server, s", [f"{sum(s['cpu_s'].values()):.2f}" if s["cpu_s"] else "-" for s in report["servers"]])
    return rows


def table_of(report: Json) -> str:
    """Return the table as text, and the CPU of each process below it."""
    rows = rows_of(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    for server in report["servers"]:
        lines += [f"CPU of {server['url']}: {name} {used_s:.2f} s" for name, used_s in sorted(server["cpu_s"].items())]
    return "\n".join(lines)
