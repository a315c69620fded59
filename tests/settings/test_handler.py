"""Engines of other packages: how they announce themselves, and which of their records settings
read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.json import decode, encode

from lmi.engine.worker import resolve as load_function
from lmi.errors import BadConfiguration
from lmi.settings.config import Config, SamplingDefaults, SamplingValues
from lmi.settings.handler import Handler, announced
from lmi.settings.resolve import Resolved
from tests.settings import settling

RECORD = """
from lmi.settings.config import SamplingDefaults, SamplingValues
from lmi.settings.handler import Handler

HANDLER = Handler(
    load="fox_engine.run:load",
    other_names=("vixen",),
    is_one_device=True,
    defaults={"option.max_rolling_batch_size": 7},
    sampling_defaults=SamplingDefaults(
        with_do_sample=SamplingValues(1.0, 5, 0.85), without=SamplingValues(0.8, 0, 0.0)
    ),
    uses=frozenset({"option.trust_remote_code"}),
    option_names=lambda: frozenset({"tail"}),
    check=lambda config: {"option.dtype": "bf16 on fox"} if config.dtype != "bf16" else {},
    environment=lambda config, environ, slot, folder: {"FOX_SLOT": str(slot)},
)
"""


@pytest.fixture
def announce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A package `fox_engine`; the fixture is the file of its entry points."""
    site = tmp_path / "site"
    (site / "fox-1.dist-info").mkdir(parents=True)
    (site / "fox-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fox\nVersion: 1\n"
    )
    (site / "fox_engine").mkdir()
    (site / "fox_engine" / "__init__.py").write_text("")
    (site / "fox_engine" / "about.py").write_text(RECORD)
    (site / "fox_engine" / "run.py").write_text("load = print")
    monkeypatch.syspath_prepend(site)
    announced.cache_clear()
    request.addfinalizer(announced.cache_clear)
    for name in ("fox_engine", "fox_engine.about", "fox_engine.run"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    return site / "fox-1.dist-info" / "entry_points.txt"


def settle(folder: Path, text: str) -> Resolved:
    text = f"option.rolling_batch=fox\n{text}"
    return settling.settle(folder, text)


def test_a_function_is_an_engine_with_the_defaults_of_a_record_and_is_not_imported(
    folder: Path, announce: Path
) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.run:load\n")
    assert announced()["fox"] == Handler(load="fox_engine.run:load")
    resolved = settle(folder, "option.tail=3")
    assert (resolved.config.engine.handler, resolved.config.engine.options) == (
        "fox",
        {"tail": "3"},
    )
    assert "fox_engine" not in sys.modules
    assert load_function("fox", announced()["fox"].load) is print


def test_a_record_says_what_settings_ask(folder: Path, announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    resolved = settle(
        folder,
        "option.dtype=bf16\noption.tail=3\noption.trust_remote_code=true\noption.strict=true",
    )

    assert (resolved.warnings, resolved.config.engine.options) == ((), {"tail": "3"})
    assert resolved.config.engine.max_num_sequences == 7

    defaults = SamplingDefaults(
        with_do_sample=SamplingValues(1.0, 5, 0.85), without=SamplingValues(0.8, 0, 0.0)
    )

    assert resolved.config.model.sampling_defaults == defaults
    assert decode(encode(resolved.config), type=Config) == resolved.config
    assert (
        settle(folder, "option.dtype=bf16\noption.tensor_parallel_degree=max").config.engine.handler
        == "fox"
    )
    assert "fox_engine.run" not in sys.modules
    assert load_function("fox", announced()["fox"].load) is print


def test_a_value_that_an_engine_refuses_by_its_default_is_a_fault_too(
    folder: Path, announce: Path
) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    with pytest.raises(
        BadConfiguration, match=r"^option\.dtype='fp16' \(serving\.properties:2\): allowed is bf16"
    ):
        settle(folder, "option.dtype=fp16")

    with pytest.raises(
        BadConfiguration, match=r"^option\.dtype=auto \(not given\): allowed is bf16 on fox$"
    ):
        settle(folder, "")


def test_a_record_that_cannot_be_imported_stops_only_those_who_ask_for_its_engine(
    folder: Path, announce: Path
) -> None:
    announce.write_text("[lmi.handlers]\nfox = a_library_that_nobody_has:HANDLER\n")
    assert settling.settle(folder).config.engine.handler == "lmi-dist"
    assert settle(folder, "").config.engine.handler == "fox"
    with pytest.raises(
        BadConfiguration, match="engine fox cannot be used here, a library is missing: .*nobody_has"
    ):
        load_function("fox", announced()["fox"].load)


def test_a_record_that_raises_stops_nobody_else(folder: Path, announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    (announce.parents[1] / "fox_engine" / "about.py").write_text("def HANDLER(")
    assert settling.settle(folder).config.engine.handler == "lmi-dist"
    with pytest.raises(SyntaxError):
        load_function("fox", announced()["fox"].load)


def test_something_else_under_the_name_of_a_record_is_refused(announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    (announce.parents[1] / "fox_engine" / "about.py").write_text("HANDLER = print")
    with pytest.raises(
        BadConfiguration, match="entry point fox: fox_engine.about:HANDLER is not a Handler"
    ):
        announced()


MEANS = """
from lmi.settings.handler import Handler

HANDLER = Handler(
    load="fox_engine.run:load",
    caveat="it bites",
    means={"option.reach": "option.max_model_len", "option.paws": "legs.count"},
    unused={"option.wings": "foxes walk"},
    option_names=lambda: frozenset({"reach", "paws"}),
    check=lambda config: {"option.paws": "4"} if config.options.get("paws") == "5" else {},
)
"""


@pytest.fixture
def fox_with_meanings(announce: Path) -> None:
    announce.write_text("[lmi.handlers]\nfox = fox_engine.about:HANDLER\n")
    (announce.parent.parent / "fox_engine" / "about.py").write_text(MEANS)


@pytest.mark.usefixtures("fox_with_meanings")
def test_an_option_that_means_another_is_read_as_that_one_and_checked_as_it(folder: Path) -> None:
    resolved = settle(folder, "option.reach=4k\noption.strict=true")
    assert (resolved.config.engine.max_sequence_length, resolved.config.engine.options) == (
        4000,
        {},
    )
    assert next(
        row for row in resolved.settings if row.option == "option.max_model_len"
    ).source == ("serving.properties:2")

    with pytest.raises(BadConfiguration, match="option.reach='far' .*: allowed is a whole number"):
        settle(folder, "option.reach=far")

    with pytest.raises(BadConfiguration, match="these mean the same option, allowed is one value"):
        settle(folder, "option.reach=1\noption.max_model_len=2")


@pytest.mark.usefixtures("fox_with_meanings")
def test_an_option_that_sets_an_argument_of_another_name_says_so(folder: Path) -> None:
    resolved = settle(folder, "option.paws=4")
    assert resolved.config.engine.options == {"paws": "4"}
    assert [row.source for row in resolved.settings if row.option == "option.paws"] == [
        "serving.properties:2, sets legs.count"
    ]
    with pytest.raises(BadConfiguration, match="option.paws='5' .*: allowed is 4"):
        settle(folder, "option.paws=5")


@pytest.mark.usefixtures("fox_with_meanings")
def test_a_caveat_and_options_without_effect_are_warnings_of_every_start(folder: Path) -> None:
    assert settle(folder, "option.wings=2\noption.strict=true").warnings == (
        "fox: it bites",
        "option.wings (serving.properties:2): fox does not use it, foxes walk",
    )
