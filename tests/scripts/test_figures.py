"""Where a benchmark's figures go: a summary in docs/performance.md, and every figure on a page
beside the plot.
"""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.table import FIGURES, PAGE, Goal, publish, table

GOALS: list[Goal] = [
    Goal("speed", "tokens/s", ">=", 2.0),
    Goal("memory", "MB", "<=", 5.0),
    Goal("start", "s", "<=", 1.0),
]


def test_a_table_says_which_goals_are_missed_and_what_was_not_measured() -> None:
    assert table({"speed": 1.5, "memory": 5.0}, GOALS, "not measured").splitlines()[2:] == [
        "| tokens/s | 1.50 | ≥ 2 (missed) |",
        "| MB | 5.00 | ≤ 5 |",
        "| s | not measured | ≤ 1 |",
    ]
    assert table({"speed": 2.0}, GOALS).splitlines()[2:] == ["| tokens/s | 2.00 | ≥ 2 |"]


def test_the_summary_replaces_the_last_one_and_the_details_are_a_page_that_it_links(
    tmp_path: Path,
) -> None:
    summary = tmp_path / PAGE
    summary.parent.mkdir()
    summary.write_text("before\n<!-- race figures -->\nold\n<!-- end of race figures -->\nafter\n")
    (tmp_path / FIGURES).mkdir(parents=True)
    for _ in range(2):
        publish("race", "| new |", ["| all |", "On a track."], plotted="speed", root=tmp_path)
        text = summary.read_text()

        assert text.startswith(
            "before\n<!-- race figures "
            "-->\n\n![speed](../scripts/benchmarks/figures/race.png)\n\n| new |"
        )
        assert text.endswith(
            "(../scripts/benchmarks/figures/race.md).\n\n<!-- end of race figures -->\nafter\n"
        )
        assert "old" not in text and text.count("| new |") == 1

    page = (tmp_path / FIGURES / "race.md").read_text()
    assert page == "# Every figure of `scripts/bench race`\n\n| all |\n\nOn a track.\n"


def test_a_summary_without_a_plot_names_the_command_of_its_page(tmp_path: Path) -> None:
    (tmp_path / PAGE).parent.mkdir()
    (tmp_path / PAGE).write_text("before\n")
    (tmp_path / FIGURES).mkdir(parents=True)
    publish("race", "| new |", ["| all |"], command="races --only one", root=tmp_path)

    text = (tmp_path / PAGE).read_text()
    assert text.startswith("before\n<!-- race figures -->\n\n| new |\n\nMeasured on")
    page = (tmp_path / FIGURES / "race.md").read_text()
    assert page == "# Every figure of `scripts/bench races --only one`\n\n| all |\n"
