"""The folder that is served, or the demo where no folder has a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.errors import ModelUnusable
from lmi.settings.model_names import model_name
from lmi.settings.resolve import resolve_folder
from lmi.settings.served_folder import demo_folder, find_folder
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

    with pytest.raises(ModelUnusable, match="'https://host/m': .* a GGUF file, whose path"):
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


def wanted(folder: Path | None, environ: dict[str, str], cwd: Path) -> list[str]:
    """The sources that a process must open or fetch before the start goes on."""
    resolved = resolve_folder(None if folder is None else str(folder), environ, {}, cwd)
    return [source.source for source in resolved.request.sources] if resolved.request else []


def test_a_gguf_file_is_opened_as_a_folder_a_file_and_an_option(tmp_path: Path) -> None:
    file = tmp_path / "models" / "fox.Q4_K_M.gguf"
    file.parent.mkdir()
    file.write_text("")
    assert wanted(file.parent, {}, tmp_path) == [str(file)]
    assert wanted(file, {}, tmp_path) == [str(file)]
    assert wanted(Path("models/fox.Q4_K_M.gguf"), {}, tmp_path) == [str(file)]
    assert wanted(None, {"OPTION_MODEL_ID": "models/fox.Q4_K_M.gguf"}, tmp_path) == [str(file)]
    assert wanted(None, {"OPTION_MODEL_ID": "models"}, tmp_path) == [str(file)]

    # Its configuration is in it, so that of another form of the model does not count.
    (file.parent / "config.json").write_text("{}")
    assert wanted(file.parent, {}, tmp_path) == [str(file)]


def test_of_several_gguf_files_one_must_be_named_and_a_projector_is_none(tmp_path: Path) -> None:
    for name in ("a.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_text("")
    assert wanted(tmp_path, {}, tmp_path) == [str(tmp_path / "a.gguf")]

    (tmp_path / "b.gguf").write_text("")
    with pytest.raises(ModelUnusable, match="name one of the files: a.gguf, b.gguf$"):
        resolve_folder(str(tmp_path), {}, {}, tmp_path)

    assert wanted(tmp_path / "b.gguf", {}, tmp_path) == [str(tmp_path / "b.gguf")]


def test_a_split_model_is_one_model_and_its_first_file_is_opened(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"a-0000{number}-of-00002.gguf").write_text("")
    assert wanted(tmp_path, {}, tmp_path) == [str(tmp_path / "a-00001-of-00002.gguf")]


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"^nothing\.gguf: does not exist"):
        resolve_folder("nothing.gguf", {}, {}, tmp_path)

    with pytest.raises(ModelUnusable, match=r"gguf': no such file in .* \(OPTION_MODEL_ID\)$"):
        resolve_folder(None, {"OPTION_MODEL_ID": "nothing.gguf"}, {}, tmp_path)


def test_only_the_embedded_engine_reads_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("")
    environ = {"OPTION_ROLLING_BATCH": "echo"}
    refusal = "a.gguf: echo does not read GGUF; option.rolling_batch may be lmi-dist$"
    with pytest.raises(ModelUnusable, match=refusal):
        resolve_folder(str(tmp_path), environ, {}, tmp_path)


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
