"""A report as one HTML page with plots, which needs no network and no script."""

from html import escape
from typing import Any, NamedTuple

from lmi.client.bench.figures import LATENCIES, rows_of

WIDTH = 360
HEIGHT = 220
LEFT = 40
BOTTOM = 36
TOP = 10
# The points of a line.
NUM_STEPS = 200
# The bins of all rounds, and the least of each.
NUM_BINS = 40
MIN_BINS = 4
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --rule: #d9dce0; --page: #fff;
  --a: #0b62d6;  --b: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #edeef0; --soft: #b0b4ba; --rule: #3a3f45; --page: #15181b; --a: #70b8ff;
    --b: #ffa057; }
}
body { margin: 0 auto; max-width: 1160px; padding: 16px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 15px; margin: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr));
  gap: 20px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--rule); } .a, .b { fill: none; stroke-width: 2; } .a { stroke: var(--a); }
.b { stroke: var(--b); stroke-dasharray: 6 3; }
.wide { overflow-x: auto; margin: 20px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child { text-align: left; font-weight: normal; position: sticky;
  left: 0; background: var(--page);  min-width: 8em; }
.key { overflow-wrap: anywhere; } .key span { display: inline-block; padding-right: 20px; }
.key svg { width: 28px; height: 8px; }
.about { color: var(--soft); overflow-wrap: anywhere; }
"""
Line = list[tuple[float, float]]


class Plot(NamedTuple):
    title: str
    # The unit of what goes from left to right.
    unit: str
    # One line for each server.
    lines: list[Line]

    @property
    def most(self) -> tuple[float, float]:
        """The largest value in both directions, more than 0."""
        points = [point for line in self.lines for point in line]
        most_x = max((x for x, _ in points), default=0.0)
        most_y = max((y for _, y in points), default=0.0)
        return most_x or 1.0, most_y or 1.0


def plots_of(report: dict[str, Any]) -> list[Plot]:
    servers = report["servers"]
    plots = []
    for name, label in LATENCIES.items():
        shares = [_shares(server, name) for server in servers]
        plots.append(Plot(f"{label.capitalize()}: share within", "ms", shares))

    rates = [_rates(server) for server in servers]
    plots.append(Plot("Output tokens per second, over time", "s", rates))
    return plots


def page_of(report: dict[str, Any]) -> str:
    servers = report["servers"]
    keys = ""
    for kind, server in zip("ab", servers, strict=False):
        keys += (
            f'<span><svg viewBox="0 0 28 8" aria-hidden="true">'
            f'<path class="{kind}" d="M0 4H28"/></svg> '
            f"{escape(server['url'])}</span>"
        )

    shown_settings = []
    for name, value in report["settings"].items():
        if value and name != "urls":
            shown_settings.append(f"{name}={value}")

    settings = escape(", ".join(shown_settings))
    plots = "".join(map(_drawn, plots_of(report)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lmi bench</title>'
        f'<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head><body><main>"
        f'<h1>lmi bench</h1><p class="key">{keys}</p>'
        f'<p class="about">{settings}</p>'
        f'<div class="plots">{plots}</div>'
        f"{_table(rows_of(report))}{_processes(report)}</main></body></html>\n"
    )


def _shares(server: dict[str, Any], name: str) -> Line:
    """Return the distribution of latencies of whole answers: a value in ms, and the share of all up
    to it.
    """
    values_ms = []
    for samples in server["samples"]:
        for sample in samples:
            if sample.is_ok:
                values_ms += [value * 1e3 for value in sample.latencies_s[name]]

    if not values_ms:
        return []

    values_ms.sort()
    num_values = len(values_ms)
    ranks = {round(step * num_values / NUM_STEPS) for step in range(1, NUM_STEPS + 1)}
    line = [(0.0, 0.0)]
    for rank in sorted(ranks - {0}):
        line.append((values_ms[rank - 1], rank / num_values))

    return line


def _rates(server: dict[str, Any]) -> Line:
    """Return tokens per second over the time of the rounds, one after another.

    Tokens count when they come, and those of an answer that is not streamed at its end.
    """
    points: Line = []
    passed_s = 0.0
    num_bins = max(MIN_BINS, NUM_BINS // len(server["samples"]))
    for samples in server["samples"]:
        start_s = min(sample.due_s for sample in samples)
        until_s = max(sample.end_s for sample in samples)
        step_s = max(until_s - start_s, 1e-9) / num_bins
        bins = [0.0] * num_bins
        for sample in samples:
            times_s = sample.times_s or [sample.end_s]
            num_tokens_each = sample.num_tokens / len(times_s)
            for time_s in times_s:
                number = int((time_s - start_s) / step_s)
                bins[min(num_bins - 1, number)] += num_tokens_each

        for number, num_tokens in enumerate(bins):
            points.append((passed_s + (number + 0.5) * step_s, num_tokens / step_s))

        passed_s += until_s - start_s

    return points


def _drawn(plot: Plot) -> str:
    """Return the lines from 0 to the largest value in both directions, with an axis for each."""
    most_x, most_y = plot.most

    def place(x: float, y: float) -> tuple[float, float]:
        across = x / most_x * (WIDTH - LEFT - 16)
        down = (1 - y / most_y) * (HEIGHT - TOP - BOTTOM)
        return LEFT + across, TOP + down

    def spelled(x: float, y: float) -> str:
        across, down = place(x, y)
        return f"{across:.1f} {down:.1f}"

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value_x = share * most_x
        value_y = share * most_y
        x, y = spelled(value_x, value_y).split()
        parts.append(f'<path class="grid" d="M{spelled(0, value_y)} L{spelled(most_x, value_y)}"/>')
        parts.append(
            f'<text x="{LEFT - 5}" y="{float(y) + 4}" text-anchor="end">{short(value_y)}</text>'
        )
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(value_x)}</text>'
        )

    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{plot.unit}</text>')
    for kind, line in zip("ab", plot.lines, strict=False):
        if line:
            path = " L".join(spelled(x, y) for x, y in line)
            parts.append(f'<path class="{kind}" d="M{path}"/>')

    name = escape(plot.title)
    content = "".join(parts)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{content}</svg>'
    return f"<section><h2>{name}</h2>{svg}</section>"


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = ""
    for row in rows[1:]:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines += f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'

    return f'<div class="wide" tabindex="0"><table><tr>{head}</tr>{lines}</table></div>'


def _processes(report: dict[str, Any]) -> str:
    rows = [["CPU seconds by process", ""]]
    for server in report["servers"]:
        for name, used_s in sorted(server["cpu_s"].items()):
            rows.append([f"{server['url']} {name}", f"{used_s:.2f}"])

    return _table(rows) if len(rows) > 1 else ""
