"""Where vLLM compiles on a CPU, as is its default, and where it cannot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

import pytest

from handlers.lmi_vllm import compiling
from lmi.settings.config import EngineConfig
from tests.machine import wait_until
from tests.served import serve
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.vllm

PROMPT = {"inputs": "The quick", "parameters": {"max_new_tokens": 24}}
SETTINGS = (
    "option.rolling_batch=vllm",
    "option.dtype=fp32",
    "option.max_kv_cache_tokens=8192",
    "frontend_workers=1",
)


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


def test_a_machine_with_a_compiler_compiles_unless_someone_says_otherwise(
    switched_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiling.why_no_compiler() is None
    assert not compiling.is_eager({}) and compiling.is_eager({"enforce_eager": "1"})
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert compiling.is_eager({}) and not compiling.is_eager({"enforce_eager": "False"})


def test_what_is_missing_is_named(
    switched_on: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiling.why_no_compiler() == "there is no C++ compiler no-such-compiler"
    monkeypatch.delenv("CXX")
    assert str(tmp_path / "Python.h") in str(compiling.why_no_compiler(headers=str(tmp_path)))


def test_without_a_compiler_the_model_runs_eagerly_and_one_line_says_why(
    switched_on: None,
    arguments: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "enforce_eager" not in arguments.engine_arguments(
        EngineConfig(handler="vllm"), str(folder)
    )
    assert caplog.messages == []

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (
        arguments.engine_arguments(EngineConfig(handler="vllm"), str(folder))["enforce_eager"]
        is True
    )

    [line] = caplog.messages
    assert "no-such-compiler" in line


@pytest.mark.timeout(900)
def test_a_server_compiles_by_default_and_an_engine_that_starts_again_finds_what_was_made() -> None:
    """Home cannot be written, so it is kept beside the server's other files."""
    environ = {"TORCHDYNAMO_DISABLE": "0", "HOME": "/proc/none", "XDG_CACHE_HOME": ""}
    answers = []
    libraries = []
    with serve(tiny_model("llama_wide"), *SETTINGS, environ=environ) as server:
        for is_last in (False, True):
            answers.append(server.post(PROMPT).lines[0]["generated_text"])
            libraries_made = Path(server.environ["TMPDIR"]).glob("lmi-*/**/vllm/**/*.so")
            libraries.append({path: path.stat().st_mtime_ns for path in libraries_made})
            if not is_last:
                os.kill(server.pid("lmi-engine"), signal.SIGKILL)
                wait_until(lambda: server.ping() != 200, "the server sees it")
                wait_until(lambda: server.ping() == 200, "the engine is back", 300.0)

    assert answers[0] == answers[1]
    assert libraries[0] and libraries[0] == libraries[1]
