"""A report as a table: of texts, and as one text for a terminal."""

from collections.abc import Mapping
from typing import Any

from lmi.client.bench.figures import LATENCIES, RATES

COUNTS = {"num_requests": "requests", "num_ok": "whole answers", "num_tokens": "output tokens"}
PARTS_OF_LATENCIES = ("mean", "p50", "p90", "p99")


def rows_of(report: dict[str, Any]) -> list[list[str]]:
    """Return a table of texts: a head, then a row for each figure, with a column for each server
    and one of ratios.
    """
    servers = report["servers"]
    totals = [server["total"] for server in servers]
    table = _Table([server["url"] for server in servers], report.get("ratios"))

    for name, label in COUNTS.items():
        table.add(label, [str(total[name]) for total in totals])

    table.add("tokens counted by", [total["counted_by"] for total in totals])
    outcomes = set[str]()
    for total in totals:
        outcomes.update(total["outcomes"])

    for outcome in sorted(outcomes - {"200"}):
        numbers = [total["outcomes"].get(outcome, 0) for total in totals]
        table.add(f"failed: {outcome}", [str(number) for number in numbers])

    for name, label in RATES.items():
        table.add(label, [f"{total[name]:.1f}" for total in totals], name)

    for name, label in LATENCIES.items():
        for part in PARTS_OF_LATENCIES:
            cells = [_milliseconds(total[name], part) for total in totals]
            table.add(f"{label}, {part}, ms", cells, f"{name}.{part}")

    table.add("CPU of the server, s", [_cpu_seconds(server["cpu_s"]) for server in servers])
    return table.rows


class _Table:
    """Rows with a cell for each server, and one for the ratio of two of them."""

    def __init__(self, urls: list[str], ratios: Mapping[str, float | None] | None) -> None:
        self._ratios = ratios
        head = ["", *urls]
        if ratios is not None:
            head.append("ratio")

        self.rows = [head]

    def add(self, label: str, cells: list[str], name: str = "") -> None:
        """Add a row. `name` is that of its figure among the ratios, if it is there."""
        row = [label, *cells]
        if self._ratios is not None:
            ratio = self._ratios.get(name)
            row.append("" if ratio is None else f"{ratio:.2f}")

        self.rows.append(row)


def _milliseconds(latencies_s: Mapping[str, float], part: str) -> str:
    return f"{latencies_s[part] * 1e3:.1f}" if latencies_s else "-"


def _cpu_seconds(cpu_s: Mapping[str, float]) -> str:
    return f"{sum(cpu_s.values()):.2f}" if cpu_s else "-"


def table_of(report: dict[str, Any]) -> str:
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
