"""A report as one HTML page with plots, which needs no network and no script."""

from html import escape
from typing import Any

from lmi.client.bench.plots import GRID, Area, Line, Plot, plots_of, short
from lmi.client.bench.table import rows_of

# The size of a plot, and the margins around its area.
WIDTH = 360
HEIGHT = 220
LEFT = 40
RIGHT = 16
BOTTOM = 36
TOP = 10
# The classes of the servers' lines, in STYLE.
LINE_CLASSES = ("a", "b")
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


def page_of(report: dict[str, Any]) -> str:
    """Return the page of a report: its plots, its table and the CPU time of processes."""
    keys = ""
    for line_class, server in zip(LINE_CLASSES, report["servers"], strict=False):
        keys += (
            f'<span><svg viewBox="0 0 28 8" aria-hidden="true">'
            f'<path class="{line_class}" d="M0 4H28"/></svg> '
            f"{escape(server['url'])}</span>"
        )

    shown_settings = []
    for name, value in report["settings"].items():
        if value and name != "urls":
            shown_settings.append(f"{name}={value}")

    settings = escape(", ".join(shown_settings))
    plots = "".join(map(_section, plots_of(report)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lmi bench</title>'
        f'<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head><body><main>"
        f'<h1>lmi bench</h1><p class="key">{keys}</p>'
        f'<p class="about">{settings}</p>'
        f'<div class="plots">{plots}</div>'
        f"{_table(rows_of(report))}{_processes(report)}</main></body></html>\n"
    )


def _section(plot: Plot) -> str:
    """Return a plot: its title, and its lines above a grid."""
    area = plot.area(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    content = _grid(area)
    content += f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{plot.unit}</text>'
    for line_class, line in zip(LINE_CLASSES, plot.lines, strict=False):
        if line:
            content += _path(line_class, area, line)

    name = escape(plot.title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{content}</svg>'
    return f"<section><h2>{name}</h2>{svg}</section>"


def _grid(area: Area) -> str:
    """Return rules, each with its value to the left, and the values below."""
    grid = ""
    for share in GRID:
        value_x = share * area.max_x
        value_y = share * area.max_y
        x, y = area.place(value_x, value_y)
        text_y = round(y, 1) + 4

        grid += _path("grid", area, [(0, value_y), (area.max_x, value_y)])
        grid += f'<text x="{LEFT - 5}" y="{text_y}" text-anchor="end">{short(value_y)}</text>'
        grid += (
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{short(value_x)}</text>"
        )

    return grid


def _path(css_class: str, area: Area, line: Line) -> str:
    """Return a line through points."""
    points = []
    for x, y in line:
        across, down = area.place(x, y)
        points.append(f"{across:.1f} {down:.1f}")

    path = " L".join(points)
    return f'<path class="{css_class}" d="M{path}"/>'


def _table(rows: list[list[str]]) -> str:
    """Return a table, whose first row is its head."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = ""
    for row in rows[1:]:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines += f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'

    return f'<div class="wide" tabindex="0"><table><tr>{head}</tr>{lines}</table></div>'


def _processes(report: dict[str, Any]) -> str:
    """Return a table of the CPU time of each process, "" where nothing is known of it."""
    rows = [["CPU seconds by process", ""]]
    for server in report["servers"]:
        for name, used_s in sorted(server["cpu_s"].items()):
            rows.append([f"{server['url']} {name}", f"{used_s:.2f}"])

    return _table(rows) if len(rows) > 1 else ""
