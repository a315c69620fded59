"""A report as one HTML page with plots, which needs no network and no script."""

from html import escape
from typing import Any, NamedTuple

from lmi.client.bench.figures import LATENCIES, rows_of

WIDTH = 360
HEIGHT = 220
LEFT = 40
BOTTOM = 36
TOP = 10
NUM_STEPS = 200  # points of a line
NUM_BINS = 40  # of all rounds
MIN_BINS = 4  # of each
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
    unit: str  # of what goes from left to right
    lines: list[Line]  # one for each server

    @property
    def most(self) -> tuple[float, float]:
        """The largest value in both directions, more than 0."""
        points = [point for line in self.lines for point in line]
        return max((x for x, _ in points), default=0.0) or 1.0, max(
            (y for _, y in points), default=0.0
        ) or 1.0


def plots_of(report: dict[str, Any]) -> list[Plot]:
    servers = report["servers"]
    plots = [
        Plot(f"{label.capitalize()}: share within", "ms", [_shares(one, name) for one in servers])
        for name, label in LATENCIES.items()
    ]
    return [
        *plots,
        Plot("Output tokens per second, over time", "s", [_rates(server) for server in servers]),
    ]


def page_of(report: dict[str, Any]) -> str:
    servers = report["servers"]
    keys = [
        f'<span><svg viewBox="0 0 28 8" aria-hidden="true"><path class="{kind}" d="M0 '
        f'4H28"/></svg> '
        f"{escape(server['url'])}</span>"
        for kind, server in zip("ab", servers, strict=False)
    ]
    settings = ", ".join(
        f"{name}={value}" for name, value in report["settings"].items() if value and name != "urls"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lmi bench</title>'
        f'<meta name="viewport" '
        f'content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f'<h1>lmi bench</h1><p class="key">{"".join(keys)}</p><p '
        f'class="about">{escape(settings)}</p>'
        f'<div class="plots">{"".join(map(_drawn, plots_of(report)))}</div>'
        f"{_table(rows_of(report))}{_processes(report)}</main></body></html>\n"
    )


def _shares(server: dict[str, Any], name: str) -> Line:
    """Return the distribution of latencies of whole answers: a value in ms, and the share of all up
    to it.
    """
    good = [sample for part in server["samples"] for sample in part if sample.is_ok]
    ordered = sorted(value * 1e3 for sample in good for value in sample.latencies_s[name])
    marks = sorted(
        {round(step * len(ordered) / NUM_STEPS) for step in range(1, NUM_STEPS + 1)} - {0}
    )
    return (
        [(0.0, 0.0), *((ordered[mark - 1], mark / len(ordered)) for mark in marks)]
        if ordered
        else []
    )


def _rates(server: dict[str, Any]) -> Line:
    """Return tokens per second over the time of the rounds, one after another. Of whole answers, at
    their end.
    """
    points: Line = []
    passed_s = 0.0
    num_bins = max(MIN_BINS, NUM_BINS // len(server["samples"]))
    for samples in server["samples"]:
        start_s = min(one.due_s for one in samples)
        until_s = max(one.end_s for one in samples)
        step_s = max(until_s - start_s, 1e-9) / num_bins
        bins = [0.0] * num_bins
        for sample in samples:
            times_s = sample.times_s or [sample.end_s]
            for time_s in times_s:
                bins[min(num_bins - 1, int((time_s - start_s) / step_s))] += (
                    sample.num_tokens / len(times_s)
                )

        points += [
            (passed_s + (number + 0.5) * step_s, count / step_s)
            for number, count in enumerate(bins)
        ]
        passed_s += until_s - start_s

    return points


def _drawn(plot: Plot) -> str:
    """Return the lines from 0 to the largest value in both directions, with an axis for each."""
    most_x, most_y = plot.most

    def at(x: float, y: float) -> str:
        return (
            f"{LEFT + x / most_x * (WIDTH - LEFT - 16):.1f} "
            f"{TOP + (1 - y / most_y) * (HEIGHT - TOP - BOTTOM):.1f}"
        )

    drawn = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(share * most_x, share * most_y).split()
        drawn.append(
            f'<path class="grid" d="M{at(0, share * most_y)} L{at(most_x, share * most_y)}"/>'
        )
        drawn.append(
            f'<text x="{LEFT - 5}" y="{float(y) + 4}" '
            f'text-anchor="end">{short(share * most_y)}</text>'
        )
        drawn.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{short(share * most_x)}</text>'
        )

    drawn.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{plot.unit}</text>')
    for kind, line in zip("ab", plot.lines, strict=False):
        if line:
            drawn.append(f'<path class="{kind}" d="M{" L".join(at(x, y) for x, y in line)}"/>')

    name = escape(plot.title)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(drawn)}</svg>'
    )
    return f"<section><h2>{name}</h2>{svg}</section>"


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: list[list[str]]) -> str:
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows[1:]
    ]
    return f'<div class="wide" tabindex="0"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _processes(report: dict[str, Any]) -> str:
    rows = [["CPU seconds by process", ""]]
    for server in report["servers"]:
        rows += [
            [f"{server['url']} {name}", f"{used_s:.2f}"]
            for name, used_s in sorted(server["cpu_s"].items())
        ]

    return _table(rows) if len(rows) > 1 else ""
