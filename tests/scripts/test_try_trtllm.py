"""`scripts/try-trtllm`: what it says where something is missing, and the table that it prints."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "try-trtllm"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader("try_trtllm", SourceFileLoader("try_trtllm", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    # Where its dataclass is looked up
    monkeypatch.setitem(sys.modules, "try_trtllm", module)
    spec.loader.exec_module(module)
    return module


def tried(**environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT], env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed")
def test_without_the_package_it_says_so_in_one_line_and_exits_with_2() -> None:
    done = tried()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "scripts/try-trtllm: TensorRT-LLM is not installed; docs/tensorrt-llm.md names a container "
        "that has it\n"
    )


@pytest.mark.skipif(find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed")
def test_a_package_without_compiled_code_is_not_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("")
    done = tried(PYTHONPATH=str(tmp_path))
    assert (
        done.returncode == 2 and f"{tmp_path / 'tensorrt_llm'} has no compiled code" in done.stderr
    )


def holds(executor: object, model: Path) -> None: ...


def does_not_hold(executor: object, model: Path) -> None:
    raise AssertionError("tokens | differ\nin line 2")


def test_a_check_that_fails_stands_with_its_reason_beside_those_that_pass(
    script: ModuleType,
) -> None:
    rows = [
        script.run("holds", lambda: holds(None, SCRIPT)),
        script.run("fails", lambda: does_not_hold(None, SCRIPT)),
    ]
    assert script.table({"GPU": "none"}, rows).splitlines() == [
        "| what | result | reason |",
        "|---|---|---|",
        "| GPU | none | |",
        "| holds | passed |  |",
        "| fails | failed | tokens / differ in line 2 |",
    ]


def test_without_a_gpu_the_checks_of_answers_are_skipped_with_the_reason(
    script: ModuleType,
) -> None:
    checks = SimpleNamespace(
        ANSWER_CHECKS=(holds, does_not_hold), why_no_gpu=lambda: "torch sees no GPU"
    )
    rows = script.answers(checks)
    assert [row.check for row in rows] == ["the engine starts", "holds", "does not hold"]
    assert {(row.outcome, row.reason) for row in rows} == {("skipped", "torch sees no GPU")}


def test_an_engine_that_does_not_start_is_a_failure_and_its_checks_are_skipped(
    script: ModuleType,
) -> None:
    def no_model(folder: Path) -> Path:
        return folder / "nowhere"

    checks = SimpleNamespace(
        ANSWER_CHECKS=(holds,),
        why_no_gpu=lambda: None,
        small_model=no_model,
        config_of_checks=lambda: None,
    )
    start, check = script.answers(checks)

    assert (start.check, start.outcome) == ("the engine starts", "failed") and start.reason
    assert (check.outcome, check.reason) == ("skipped", "the engine did not start")
