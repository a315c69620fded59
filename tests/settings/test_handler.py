"""Engines of other packages: how they announce themselves, and which of their records settings read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmi.engine.resolve import resolve as load_function
from lmi.errors import BadConfiguration
from lmi.settings.handler import Handler, announced
from lmi.settings.properties import parse
from lmi.settings.report import Resolved
from lmi.settings.resolve import resolve
from tests.settings.settling import CPU

RECORD = """
from lmi.settings.handler import Handler

HANDLER = Handler(
    load="fox_engine.run:load",
    other_names=("vixen",),
    is_one_device=True,
    defaults={"option.max_rolling_batch_size": 7},
    uses=frozenset({"option.trust_remote_code"}),
    option_names=lambda: frozenset({"tail"}),
    check=lambda config: {"option.dtype": "bf16 on fox"} if config.dtype != "bf16" else {},
    environment=lambda config, environ, slot, folder: {"FOX_SLOT": str(slot)},
)
"""


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `fox_engine`; the fixture is the file of its entry points."""
    site = tmp_path / "site"
    (site / "fox-1.dist-info").mkdir(parents=True)
    (site / "fox-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fox\nVersion: 1\n")
    (site / "fox_engine").mkdir()
    (site / "fox_engine" / "__init__.py").write_text("")
    (site / "fox_engine" / "about.py").write_text(RECORD)
    (site / "fox_engine" / "run.py").write_text("load = print")
    monkeypatch.syspath_prepend(site)
    for name in ("fox_engine", "fox_engine.about", "fox_engine.run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return site / "fox-1.dist-info" / "entry_points.txt"


def settle(folder: Path, text: str) -> Resolved:
    text = f"option.rolling_batch=fox\n{text}"
    return resolve(parse(text), {}, {}, folder=folder, cwd=folder.parent, machine=CPU)


def test_a_function_is_an_engine_with_the_defaults_of_a_record_and_is_not_imported(
    folder: Path, announce: Path
) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.run:load\n")
    assert announced()["fox"] == Handler(load="fox_engine.run:load")
    resolved = settle(folder, "option.tail=3")
    assert (resolved.config.engine.handler, resolved.config.engine.options) == ("fox", {"tail": "3"})
    assert "fox_engine" not in sys.modules
    assert load_function("fox") is print


def test_a_record_says_what_settings_ask(folder: Path, announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    resolved = settle(folder, "option.dtype=bf16\noption.tail=3\noption.trust_remote_code=true\noption.strict=true")
    assert (resolved.warnings, resolved.config.engine.options) == ((), {"tail": "3"})
    assert resolved.config.engine.max_num_sequences == 7
    assert settle(folder, "option.dtype=bf16\noption.tensor_parallel_degree=max").config.engine.handler == "fox"
    assert "fox_engine.run" not in sys.modules
    assert load_function("fox") is print


def test_a_value_that_an_engine_refuses_by_its_default_is_a_fault_too(folder: Path, announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    with pytest.raises(BadConfiguration, match=r"^option\.dtype='fp16' \(serving\.properties:2\): allowed is bf16"):
        settle(folder, "option.dtype=fp16")
    with pytest.raises(BadConfiguration, match=r"^option\.dtype=auto \(not given\): allowed is bf16 on fox$"):
        settle(folder, "")


def test_a_record_that_cannot_be_imported_stops_only_those_who_ask_for_its_engine(folder: Path, announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = a_library_that_nobody_has:HANDLER\n")
    assert resolve(parse(""), {}, {}, folder=folder, machine=CPU).config.engine.handler == "lmi-dist"
    assert settle(folder, "").config.engine.handler == "fox"
    with pytest.raises(BadConfiguration, match="engine fox cannot be used here, a library is missing: .*nobody_has"):
        load_function("fox")


def test_a_record_that_raises_stops_nobody_else(folder: Path, announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    (announce.parents[1] / "fox_engine" / "about.py").write_text("def HANDLER(")
    assert resolve(parse(""), {}, {}, folder=folder, machine=CPU).config.engine.handler == "lmi-dist"
    with pytest.raises(SyntaxError):
        load_function("fox")


def test_something_else_under_the_name_of_a_record_is_refused(announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    (announce.parents[1] / "fox_engine" / "about.py").write_text("HANDLER = print")
    with pytest.raises(BadConfiguration, match="entry point fox: fox_engine.about:HANDLER is not a Handler"):
        announced()
