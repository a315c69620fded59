"""Figures, prompts and pages of `lmi bench`, of samples with known answers."""

from __future__ import annotations

import itertools
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from lmi.cli import lmi
from lmi.client.bench.dialects import DIALECTS, Ask
from lmi.client.bench.figures import figures_of, quantile, report_of
from lmi.client.bench.load import LOST, Load, Sample, client_of, merged
from lmi.client.bench.page import page_of
from lmi.client.bench.prompts import of_file, synthetic
from lmi.client.bench.table import table_of

FAST = Sample(0.0, 1.0, "200", [0.25, 0.5, 1.0], 4)
SLOW = Sample(1.0, 4.0, "200", [3.0, 4.0])
FAILED = [Sample(0.0, 2.0, "503"), Sample(0.5, 1.0, LOST, [0.75])]


def test_the_figures_of_a_round() -> None:
    figures = figures_of([[FAST, SLOW, *FAILED]], {})
    assert (figures["num_requests"], figures["num_ok"], figures["seconds"]) == (4, 2, 4.0)
    assert figures["outcomes"] == {"200": 2, "503": 1, LOST: 1}
    assert (figures["num_tokens"], figures["counted_by"], figures["tokens_per_s"]) == (
        6,
        "events and usage",
        1.5,
    )
    assert figures["first_s"] == {"mean": 1.125, "p50": 0.25, "p90": 2.0, "p99": 2.0}
    assert figures["gap_s"] == {"mean": pytest.approx(1.75 / 3), "p50": 0.5, "p90": 1.0, "p99": 1.0}
    assert figures["end_s"] == {"mean": 2.0, "p50": 1.0, "p90": 3.0, "p99": 3.0}


def test_the_time_between_rounds_does_not_count() -> None:
    later = Sample(100.0, 101.0, "200", [], None)
    figures = figures_of([[FAST], [later]], {})
    assert (figures["seconds"], figures["requests_per_s"], figures["first_s"]["mean"]) == (
        2.0,
        1.0,
        0.25,
    )
    assert figures_of([[later]], {})["counted_by"] == "nothing"


@pytest.mark.parametrize(
    ("targets", "num_good"),
    [
        ({}, 2),
        ({"first_s": 0.25}, 1),
        ({"gap_s": 0.375}, 1),
        ({"gap_s": 0.37}, 0),
        ({"end_s": 3.0}, 2),
        ({"first_s": 2.0, "end_s": 1.0}, 1),
    ],
)
def test_goodput_counts_answers_that_hold_every_target(
    targets: dict[str, float], num_good: int
) -> None:
    assert figures_of([[FAST, SLOW, *FAILED]], targets)["goodput_per_s"] == num_good / 4.0


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0, 0.5, 0.9, 0.99, 1)] == [1, 50, 90, 99, 100]
    assert math.isnan(quantile([], 0.5))


def served(url: str, *rounds: list[Sample]) -> Load:
    cpu_s = {"lmi-front-0 (7)": 1.5}
    return Load(url, client_of(url, {}), DIALECTS["lmi"], "", rounds=list(rounds), cpu_s=cpu_s)


def test_a_ratio_is_the_median_over_the_rounds() -> None:
    ends_s = [(1.0, 2.0), (1.0, 3.0), (1.0, 9.0)]
    first = served("http://a", *([Sample(0.0, end_s, "200", [0.5], 6)] for end_s, _ in ends_s))
    second = served(
        "http://b", *([Sample(0.0, sample_end_s, "200", [0.5], 6)] for _, sample_end_s in ends_s)
    )
    report = report_of({}, [first, second], {})

    assert report["ratios"]["end_s.p50"] == 3.0 and report["ratios"]["first_s.p99"] == 1.0
    assert report["ratios"]["tokens_per_s"] == pytest.approx(1 / 3)

    rows = [line.split() for line in table_of(report).splitlines()]
    assert ["tokens/s", "6.0", "1.3", "0.33"] in rows
    assert rows[-1] == ["CPU", "of", "http://b:", "lmi-front-0", "(7)", "1.50", "s"]


class Page(HTMLParser):
    """Keeps the tags of a page, and which are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "samples", [[FAST, SLOW, *FAILED], FAILED], ids=["some answers", "no answer"]
)
def test_a_page_has_its_plots_and_loads_nothing(samples: list[Sample]) -> None:
    text = page_of(
        report_of(
            {"model": "<b>"}, [served("http://a?<i>", samples), served("http://b", samples)], {}
        )
    )
    page = Page(text)
    assert page.open == [] and [tag for tag, _ in page.tags].count("section") == 4
    assert "<b>" not in text and "<i>" not in text and "nan" not in text
    assert not {"src", "href"} & {name for _, names in page.tags for name in names}
    assert not {"script", "link", "img"} & {tag for tag, _ in page.tags}


@pytest.mark.parametrize(
    "samples", [[FAST, SLOW, *FAILED], FAILED], ids=["some answers", "no answer"]
)
def test_a_picture_has_a_line_of_each_server(samples: list[Sample], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from lmi.client.bench.picture import COLOURS, write_picture

    report = report_of({}, [served("http://a", samples), served("http://b", [FAST])], {})
    write_picture(report, tmp_path / "bench.png")
    picture = image.open(tmp_path / "bench.png")
    colours = {
        f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in picture.getcolors(1 << 20)
    }
    assert picture.format == "PNG" and {"#ffffff", *COLOURS} <= colours


def test_a_picture_without_pillow_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "lmi.client.bench.picture", raising=False)
    done = CliRunner().invoke(lmi, ["bench", "http://127.0.0.1:1", "--png", "bench.png"])
    assert done.exit_code == 1 and "--png needs Pillow: pip install pillow" in done.output


def test_made_prompts_share_their_beginnings() -> None:
    asks = list(itertools.islice(synthetic(12, 8, 2, 5, seed=1), 40))
    assert asks == list(itertools.islice(synthetic(12, 8, 2, 5, seed=1), 40))
    assert {(len(ask.prompt.split()), ask.max_tokens) for ask in asks} == {(12, 5)}
    assert (
        len({tuple(ask.prompt.split()[:8]) for ask in asks}) == 2
        and len({ask.prompt for ask in asks}) > 20
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_has_texts_and_objects_and_is_read_again_at_its_end(
    tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "prompts").write_text(
        'plain text\n\n{"prompt": "an object", "max_tokens": 3}\n', encoding
    )
    asks = list(itertools.islice(of_file(tmp_path / "prompts", 7), 3))
    assert asks == [Ask("plain text", 7), Ask("an object", 3), Ask("plain text", 7)]


@pytest.mark.parametrize(
    ("text", "said"), [("\n", "no prompts"), ('a\n{"text": 1}\n', "prompt 2: not an object")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prompts").write_text(text)
    with pytest.raises(click.ClickException, match=said):
        of_file(tmp_path / "prompts", 7)


def test_further_fields_reach_into_objects() -> None:
    body: dict[str, Any] = {"inputs": "a", "parameters": {"max_new_tokens": 3, "details": True}}
    extra = {"parameters": {"details": False}, "seed": 1}
    assert merged(body, extra) == {
        "inputs": "a",
        "parameters": {"max_new_tokens": 3, "details": False},
        "seed": 1,
    }
