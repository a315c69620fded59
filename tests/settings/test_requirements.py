"""Which requirements.txt is installed, for whom, and into which folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.settings.settling import faults, settle

HANDLE = "def handle(inputs): ...\n"


@pytest.fixture
def model(folder: Path) -> Path:
    (folder / "model.py").write_text(HANDLE)
    (folder / "requirements.txt").write_text("one\n")
    return folder


def installed_in(folder: Path, text: str = "", **environ: str) -> str:
    requirements = settle(
        folder, text, {"SERVING_DOWNLOAD_DIR": "/cache", **environ}
    ).config.requirements
    assert requirements is not None
    return requirements.folder


def test_the_file_beside_the_model_is_installed_for_user_code(model: Path) -> None:
    resolved = settle(model, "download_dir=/cache")
    assert resolved.config.requirements is not None
    assert resolved.config.requirements.file == str(model / "requirements.txt")
    assert Path(resolved.config.requirements.folder).parent == Path("/cache/requirements")
    assert not Path(resolved.config.requirements.folder).exists()


def test_the_file_beside_serving_properties_counts_where_the_model_has_none(
    model: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (model / "requirements.txt").rename(served / "requirements.txt")
    requirements = settle(served, f"option.model_id={model}").config.requirements
    assert requirements is not None and requirements.file == str(served / "requirements.txt")


def test_the_folder_changes_with_the_file_and_with_the_wheels_beside_it(model: Path) -> None:
    first = installed_in(model)
    assert installed_in(model) == first
    (model / "requirements.txt").write_text("two\n")
    second = installed_in(model)
    (model / "requirements").mkdir()
    assert installed_in(model) == second
    (model / "requirements" / "two-1-py3-none-any.whl").touch()
    third = installed_in(model)
    assert len({first, second, third}) == 3


def test_a_model_without_code_of_its_own_has_nothing_installed_and_says_so(model: Path) -> None:
    (model / "model.py").unlink()
    resolved = settle(model)
    assert resolved.config.requirements is None
    (note,) = [note for note in resolved.notes if note.startswith(str(model / "requirements.txt"))]
    assert "no code of the model runs" in note
    assert settle(model, "option.trust_remote_code=true").config.requirements is not None


@pytest.mark.parametrize(
    ("text", "environ"),
    [("option.install_requirements=false", {}), ("", {"STANDARD_AUTO_INSTALL_REQ": "False"})],
)
def test_it_can_be_switched_off(model: Path, text: str, environ: dict[str, str]) -> None:
    resolved = settle(model, text, environ)
    assert resolved.config.requirements is None
    assert any("not installed, by option.install_requirements=" in note for note in resolved.notes)


def test_without_a_file_nothing_is_said(model: Path) -> None:
    (model / "requirements.txt").unlink()
    resolved = settle(model)
    assert resolved.config.requirements is None
    assert not any("requirements" in note for note in resolved.notes)


def test_the_operator_s_words_for_pip_take_the_place_of_the_file(model: Path) -> None:
    secret = "--index-url https://me:secret@host/simple one"
    config = settle(model, environ={"STANDARD_PIP_ARGS": secret}).config
    requirements = config.requirements
    assert requirements is not None and requirements.has_words
    assert Path(requirements.file).parent == model
    assert "secret" not in str(config), "they are in the environment alone"

    other = settle(model, environ={"STANDARD_PIP_ARGS": "two"}).config.requirements
    assert other is not None and other.folder != requirements.folder

    off = {"STANDARD_PIP_ARGS": "two", "STANDARD_AUTO_INSTALL_REQ": "false"}
    assert settle(model, environ=off).config.requirements is None

    (fault,) = faults(model, environ={"STANDARD_PIP_ARGS": "one 'two"})
    assert fault == (
        "STANDARD_PIP_ARGS: must be words as a shell reads them, and is not: No closing quotation"
    )
