"""Figures beside their goals as a table, its place on a page, and the page with all figures of a
benchmark.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = Path("docs/performance.md")
FIGURES = Path("scripts/benchmarks/figures")


class Goal(NamedTuple):
    """What a figure shall reach."""

    figure: str
    # Its description.
    text: str
    # <= or >=.
    relation: str
    bound: float

    @property
    def sign(self) -> str:
        return "≤" if self.relation == "<=" else "≥"

    def is_met(self, value: float) -> bool:
        if self.relation == "<=":
            return value <= self.bound

        return value >= self.bound


def table(figures: dict[str, float], goals: list[Goal], otherwise: str = "") -> str:
    """Return a row for each figure that has a goal. `otherwise` fills the rows of goals without a
    figure.
    """
    rows = []
    for goal in goals:
        bound = f"{goal.sign} {goal.bound:g}"
        if goal.figure in figures:
            value = figures[goal.figure]
            verdict = bound if goal.is_met(value) else f"{bound} (missed)"
            rows.append([goal.text, f"{value:.2f}", verdict])
        elif otherwise:
            rows.append([goal.text, otherwise, bound])

    return markdown(["figure", "measured", "goal"], rows)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        lines.append(_line(row))

    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def machine() -> str:
    """Return the processor of this machine, its cores, and the version of Python."""
    num_cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {num_cores} cores, Python {platform.python_version()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if "model name" in line:
            return line.split(":")[1].strip()

    return platform.processor()


def write(text: str, marks: tuple[str, str], page: Path) -> None:
    """Put the text between these marks of a page, or behind the first where the second lacks."""
    begin, end = marks
    before, _, after = page.read_text().partition(begin)
    if end in after:
        _, _, after = after.partition(end)

    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def publish(
    name: str,
    summary: str,
    details: list[str],
    *,
    plotted: str | None = None,
    command: str | None = None,
    root: Path = ROOT,
) -> None:
    """Put the plot, if there is one, and the summary between the marks of this benchmark in PAGE,
    and the details on a page of their own.

    `plotted` says what the plot shows, `command` what was run where that is not the name.
    """
    page = FIGURES / f"{name}.md"
    title = f"# Every figure of `scripts/bench {command or name}`"
    (root / page).write_text("\n\n".join([title, *details]) + "\n")
    parts = [summary]
    if plotted is not None:
        parts.insert(0, f"![{plotted}](../{page.with_suffix('.png')})")

    link = f"Measured on {machine()}: [every figure, and how it was measured](../{page})."
    marks = f"<!-- {name} figures -->", f"<!-- end of {name} figures -->"
    write("\n\n".join([*parts, link]), marks, root / PAGE)
