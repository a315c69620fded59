"""Which packages the engine's process takes where lmi's environment lies on top of
TensorRT-LLM's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from handlers.lmi_trtllm.about import HANDLER, base_packages
from lmi.settings.config import EngineConfig


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages below lmi's environment, with TensorRT-LLM and a package that lmi has
    too.
    """
    folder = tmp_path / "dist-packages"
    for name in ("tensorrt_llm", "huggingface_hub"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")

    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_packages_below_come_first_in_the_engines_process(below: Path) -> None:
    environ = HANDLER.environment(EngineConfig(), {}, 0, "")
    assert environ["PYTHONPATH"] == str(below)

    code = "import huggingface_hub; print(huggingface_hub.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout.strip() == str(below / "huggingface_hub" / "__init__.py"), done.stderr


def test_paths_that_the_operator_set_stay_behind_them(below: Path) -> None:
    environ = {"PYTHONPATH": os.pathsep.join(["/one", str(below), "/two"])}
    assert base_packages(environ) == {"PYTHONPATH": os.pathsep.join([str(below), "/one", "/two"])}


def test_nothing_changes_where_tensorrt_llm_is_in_lmis_own_environment(below: Path) -> None:
    assert base_packages({"PYTHONPATH": "/one"}, prefix=str(below.parent)) == {}


def test_nothing_changes_where_tensorrt_llm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if it were not installed
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    assert base_packages({"PYTHONPATH": "/one"}) == {}
