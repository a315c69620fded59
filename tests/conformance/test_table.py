"""The tables of `docs/engines.md` say what the engines of this suite can and do."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from lmi.executor import Capabilities, Executor
from tests.conformance.conftest import ADAPTABLE
from tests.conformance.table import (
    ENGINES,
    abilities,
    behaviours,
    has,
    head,
    needs,
    tables,
    written,
)

HOW = "scripts/conformance-table writes it anew"


def test_the_readme_has_every_capability_and_every_behaviour_of_the_suite() -> None:
    empty = dict.fromkeys(ENGINES, Capabilities())
    assert _first_column(written()) == _first_column(tables(empty)), HOW


def test_the_readme_says_what_this_engine_can_and_does(
    executor: Executor, request: pytest.FixtureRequest
) -> None:
    column = request.node.callspec.params["shared"]
    if column not in ENGINES:
        # An engine of the tests
        return

    if column == "lmi-dist" and not executor.info.kernels.startswith("native"):
        # The table tells of native kernels
        return

    can = msgspec.structs.replace(executor.capabilities, lora=column in ADAPTABLE)
    assert _column(written(), column) == _column(tables({column: can}), column), HOW


def test_a_behaviour_needs_what_engines_may_lack() -> None:
    everything = {need for behaviour in behaviours() for need in behaviour.needs}
    assert {name for name, _ in everything} <= set(abilities(Capabilities()))
    assert [behaviour.cell(Capabilities()) for behaviour in behaviours()].count("yes") > 40


def test_what_an_engine_has_is_read_from_its_capabilities() -> None:
    assert not has(Capabilities(max_beam_width=1), ("max_beam_width", None))
    assert has(Capabilities(max_beam_width=2), ("max_beam_width", None))
    assert needs("lora").args == ("lora", None)


def test_the_only_reason_to_skip_a_test_is_a_capability() -> None:
    folder = Path(__file__).parent
    skips = re.compile(r"pytest\.skip[(]|mark\.skip")
    skipping = [path.name for path in folder.glob("*.py") if skips.search(path.read_text())]
    assert skipping == ["conftest.py"]


def _rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line
    ]


def _first_column(text: str) -> list[str]:
    return [row[0] for row in _rows(text)]


def _column(text: str, engine: str) -> list[tuple[str, str]]:
    rows = _rows(text)
    at = rows[0].index(head(engine))
    return [(row[0], row[at]) for row in rows]
