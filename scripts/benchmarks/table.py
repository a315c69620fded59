"""Figures beside their goals as a table, its place on a page, and the page with all figures of a
benchmark.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = Path("docs/performance.md")
FIGURES = Path("scripts/benchmarks/figures")
# Figure, its description, relation, bound
Goal = tuple[str, str, str, float]


def table(figures: dict[str, float], goals: list[Goal], otherwise: str = "") -> str:
    """A row for each figure that has a goal. `otherwise` fills the rows of goals
    without a figure.
    """
    rows = []
    for name, text, relation, goal in goals:
        sign = "≤" if relation == "<=" else "≥"
        if name in figures:
            is_met = figures[name] <= goal if relation == "<=" else figures[name] >= goal
            rows.append(
                [text, f"{figures[name]:.2f}", f"{sign} {goal:g}{'' if is_met else ' (missed)'}"]
            )
        elif otherwise:
            rows.append([text, otherwise, f"{sign} {goal:g}"])

    return markdown(["figure", "measured", "goal"], rows)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(
        (line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor()
    )
    return f"{processor}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def write(text: str, marks: tuple[str, str], page: Path) -> None:
    """Put the text between these marks of a page."""
    begin, end = marks
    before, _, tail = page.read_text().partition(begin)
    after = tail.partition(end)[2] if end in tail else tail
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def publish(
    name: str, summary: str, details: list[str], *, plotted: str, root: Path = ROOT
) -> None:
    """Put the plot and the summary between the marks of this benchmark in PAGE, and the details on
    a page.
    """
    page = FIGURES / f"{name}.md"
    (root / page).write_text(
        "\n\n".join([f"# Every figure of `scripts/bench {name}`", *details]) + "\n"
    )
    picture = f"![{plotted}](../{page.with_suffix('.png')})"
    link = f"Measured on {machine()}: [every figure, and how it was measured](../{page})."
    marks = f"<!-- {name} figures -->", f"<!-- end of {name} figures -->"
    write("\n\n".join([picture, summary, link]), marks, root / PAGE)
