"""The folder that is served, or the demo where no folder has a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.errors import ModelUnusable
from lmi.settings.model_choice import demo_folder, find_folder, model_name
from lmi.settings.resolve import resolve_folder
from tests.settings.settling import settle


def test_folders_without_a_model_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="is empty"):
        settle(tmp_path)

    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(
        ModelUnusable, match=r"holds weights\.bin; a model's folder has a config\.json"
    ):
        settle(tmp_path)

    with pytest.raises(ModelUnusable, match="does not exist"):
        resolve_folder(str(tmp_path / "nowhere"), {}, {}, tmp_path)

    with pytest.raises(ModelUnusable, match="is not a folder"):
        resolve_folder("weights.bin", {}, {}, tmp_path)

    with pytest.raises(ModelUnusable, match="'https://host/m': no source has the scheme https://"):
        resolve_folder("https://host/m", {}, {}, tmp_path)


@pytest.mark.parametrize(
    ("asked", "meant"), [("demos", "demo"), ("models/qwen", ""), ("qwen4", "qwen3"), ("x", "")]
)
def test_a_folder_that_is_not_there_is_asked_about_if_its_name_is_nearly_one_that_is(
    tmp_path: Path, asked: str, meant: str
) -> None:
    (tmp_path / "qwen3").mkdir()
    with pytest.raises(ModelUnusable) as refusal:
        find_folder(asked, tmp_path)

    assert str(refusal.value) == f"{asked}: does not exist" + (
        f"; did you mean {meant}?" if meant else ""
    )


def test_gguf_is_named_as_not_read_as_a_folder_a_file_and_an_id(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "fox.Q4_K_M.gguf").write_text("")
    with pytest.raises(
        ModelUnusable, match=r"fox\.Q4_K_M\.gguf \(GGUF is not read\); a model's folder has"
    ):
        settle(tmp_path / "models")

    (tmp_path / "models" / "config.json").write_text("{}")
    with pytest.raises(
        ModelUnusable, match=r"fox\.Q4_K_M\.gguf \(GGUF is not read\); no weights are there"
    ):
        settle(tmp_path / "models")

    for asked in ("models/fox.Q4_K_M.gguf", "models/nothing.gguf"):
        with pytest.raises(ModelUnusable, match=f"^{asked}: GGUF is not read$"):
            resolve_folder(asked, {}, {}, tmp_path)

        with pytest.raises(ModelUnusable, match=r"gguf': GGUF is not read \(OPTION_MODEL_ID\)$"):
            resolve_folder(None, {"OPTION_MODEL_ID": asked}, {}, tmp_path)


def test_the_folder_is_the_one_asked_for_else_the_platforms_else_the_current_else_none(
    tmp_path: Path,
) -> None:
    platform = tmp_path / "platform"
    current = tmp_path / "current"
    current.mkdir()
    assert find_folder(None, current, platform) is None

    platform.mkdir()
    assert find_folder(None, current, platform) is None

    (current / "serving.properties").write_text("")
    assert find_folder(None, current, platform) == current

    (platform / "config.json").write_text("{}")
    assert find_folder(None, current, platform) == platform
    assert find_folder("../current", current, platform) == current / "../current"


def test_a_folder_that_only_holds_a_folder_stands_for_it(folder: Path) -> None:
    assert find_folder(str(folder.parent), Path.cwd()) == folder


def test_the_demo_is_found_without_importing_an_engine(tmp_path: Path) -> None:
    demo = demo_folder()
    assert demo.parts[-3:] == ("handlers", "lmi_dist", "demo")
    for flags in ({}, {"option.model_id": "demo"}):
        resolved = resolve_folder(None, {}, flags, tmp_path)
        assert resolved.config.model.path == str(demo)
        assert resolved.config.model.name == "demo"


def test_demo_as_the_folder_is_the_demo_where_no_folder_has_that_name(tmp_path: Path) -> None:
    assert resolve_folder("demo", {}, {}, tmp_path).config.model.path == str(demo_folder())
    (tmp_path / "demo").mkdir()
    with pytest.raises(ModelUnusable, match="is empty"):
        resolve_folder("demo", {}, {}, tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.1_8B", "Llama-3.1_8B"),
        ("my model (v2)", "my_model__v2_"),
        ("…", "model"),
        ("..", "model"),
    ],
)
def test_a_folders_name_becomes_a_safe_model_name(text: str, name: str) -> None:
    assert model_name(text) == name
