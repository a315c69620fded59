"""A model's requirements.txt: who sees what was installed, and who does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi.settings.resolve import resolve_folder
from lmi.user_code.runner import COMPAT
from tests.served import launch
from tests.system.container import write_model
from tests.wheels import snapshot, write_wheel

HANDLER = """
import sys
import one
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add_as_json({"version": one.VERSION, "path": sys.path})
"""  # noqa: E501
FORMATTER = """
import one
from djl_python.output_formatter import output_formatter

@output_formatter
def form(output):
    return f"one {one.VERSION}"
"""
REQUEST = {"inputs": "a", "parameters": {"max_new_tokens": 1}}


def write(folder: Path, source: str) -> Path:
    """A model whose code needs a package, which lies beside its requirements.txt as a wheel."""
    write_model(folder)
    (folder / "model.py").write_text(source)
    (folder / "requirements.txt").write_text("one\n")
    write_wheel(folder / "requirements", "one")
    return folder


def installed_in(folder: Path, environ: dict[str, str]) -> str:
    """The folder that the server installs what the model needs in."""
    requirements = resolve_folder(str(folder), environ, {}).config.requirements
    assert requirements is not None
    return requirements.folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}


def test_user_code_imports_what_was_installed_before_anything_else(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = write(tmp_path / "model", HANDLER)
    before = snapshot(folder)
    installed = installed_in(folder, environ)
    with launch(folder, environ) as server:
        server.wait_ready()
        answer = json.loads(server.post(REQUEST).body)
        assert answer["version"] == "1.0"

        # As Python puts the folder of a script before everything
        own_places = (
            str(folder),
            str(COMPAT),
        )
        assert next(place for place in answer["path"] if place not in own_places) == installed

    assert snapshot(folder) == before


def test_front_ends_engines_and_supervisor_never_see_it(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = write(tmp_path / "model", FORMATTER)
    installed = installed_in(folder, environ).encode()
    with launch(folder, environ) as server:
        server.wait_ready()
        assert server.post(REQUEST).body == b"one 1.0\n"
        for pid in server.pids():
            is_code = Path(f"/proc/{pid}/comm").read_text().startswith("lmi-code")
            assert (installed in Path(f"/proc/{pid}/environ").read_bytes()) == is_code


def test_switched_off_the_code_that_needs_it_cannot_be_loaded(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = write(tmp_path / "model", HANDLER)
    with launch(folder, {**environ, "STANDARD_AUTO_INSTALL_REQ": "false"}) as server:
        assert server.wait(60) == 4
        words = server.last_words()
        assert "No module named 'one'" in words["message"] and "requirements.txt" in words["hint"]

    assert not (tmp_path / "cache").exists()
