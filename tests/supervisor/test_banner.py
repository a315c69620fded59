"""The lines that the supervisor writes for people."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from msgspec import structs

from lmi.engine.resolve import missing_library
from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig, UserCodeConfig
from lmi.settings.engine_choice import choose_handler
from lmi.settings.handler import announced
from lmi.settings.machine import Machine
from lmi.shared.report import LoadReport
from lmi.shared.state import Block
from lmi.supervisor.banner import DAMAGED_FILE_HINT, HINTS, Failure, banner, hint, say_failed, say_ready
from lmi.user_code.worker import load

ROOT = Path(__file__).parents[2]
REPORT = LoadReport(
    engine="echo",
    device="cpu",
    dtype="fp32",
    max_sequence_length=512,
    max_num_sequences=4,
    stages_s={"weights": 1.25, "warm-up": 0.5},
)


def config(log_format: str = "json", host: str = "0.0.0.0") -> Config:
    server = ServerConfig(host=host, port=8080, log_format=log_format)
    return Config(server=server, model=ModelConfig(path="/models/fox", name="fox"), engine=EngineConfig())


def test_ready_is_one_json_event_where_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    say_ready(config(), 8080, REPORT, after_s=2.0)
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["model"], event["port"]) == ("ready", "fox", 8080)
    assert event["stages_s"] == {"weights": 1.25, "warm-up": 0.5}


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("h", "h")])
def test_the_banner_has_urls_that_work_from_this_machine(host: str, url: str) -> None:
    text = banner(config("text", host), 8081, REPORT, after_s=2.0)
    for path in ("ping", "invocations", "metrics"):
        assert f"http://{url}:8081/{path}" in text
    assert "weights 1.2, warm-up 0.5" in text and "512 tokens" in text


def test_what_computes_is_told_where_an_engine_has_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    native = structs.replace(REPORT, kernels="native x86-64-v4")
    assert "echo, cpu, fp32, native x86-64-v4 kernels\n" in banner(config("text"), 8080, native, after_s=2.0)
    assert "echo, cpu, fp32\n" in banner(config("text"), 8080, REPORT, after_s=2.0)
    say_ready(config(), 8080, native, after_s=2.0)
    assert json.loads(capsys.readouterr().out)["kernels"] == "native x86-64-v4"


def test_a_handler_is_announced_by_its_file_and_has_no_context_length(capsys: pytest.CaptureFixture[str]) -> None:
    fox = replace(config("text"), user_code=UserCodeConfig(path="/models/fox/model.py", handler="handle"))
    assert "handle in /models/fox/model.py" in banner(fox, 8080, REPORT, after_s=2.0)
    report = LoadReport(engine="model.py", stages_s={"load": 0.5})
    say_ready(replace(fox, server=config().server), 8080, report, after_s=2.0)
    assert json.loads(capsys.readouterr().out)["max_sequence_length"] is None


def test_the_last_words_are_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    say_failed(Failure(code=4, cause="model_unusable", stage="weights", message="line one\nline two"))
    [line] = capsys.readouterr().err.splitlines()
    words = json.loads(line)
    assert words["hint"] == HINTS["model_unusable"] and words["message"] == "line one\nline two"


def test_the_last_words_are_text_where_the_log_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    say_failed(Failure(code=4, cause="model_unusable", stage="weights", message="one\ntwo\x1b[2J"), "text")
    assert capsys.readouterr().err.splitlines() == ["lmi: one", "lmi: two\\u001b[2J", f"     {HINTS['model_unusable']}"]


def unusable(message: str) -> str:
    return hint(Failure(code=4, cause="model_unusable", stage="front end", message=message))


def test_the_hint_about_a_models_folder_is_not_for_a_fault_in_one_of_its_files(tmp_path: Path) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% if %}")
    assert unusable(f"{template}: line 1: Expected an expression") == DAMAGED_FILE_HINT
    assert unusable("option.chat_template: Expected an expression, line 1") == HINTS["bad_configuration"]
    assert unusable(f"{tmp_path}: no tokenizer") == unusable(f"{tmp_path}/nowhere: missing") == HINTS["model_unusable"]


def not_configured(error: BadConfiguration) -> str:
    return hint(Failure(code=2, cause=error.label, stage="import", message=str(error)))


@pytest.mark.parametrize(("library", "extra"), [("torch", "torch"), ("safetensors", "torch"), ("vllm", "vllm")])
def test_a_missing_library_names_the_extra_that_brings_it(library: str, extra: str) -> None:
    error = missing_library("any", ModuleNotFoundError(f"No module named '{library}.nn'"))
    assert not_configured(error) == f"pip install 'lmi[{extra}]'"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(name.replace("-", "_").startswith(library) for name in extras[extra])


def test_a_missing_engine_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(BadConfiguration) as refusal:
        choose_handler("vllm", Machine(num_cores=1), announced())
    assert not_configured(refusal.value) == "pip install 'lmi[vllm]'"
    with pytest.raises(ImportError) as refused:
        version("tensorrt_llm_that_nobody_has")
    advice = "install tensorrt_llm_that_nobody_has where lmi itself is installed"
    assert not_configured(missing_library("any", refused.value)) == advice


def test_a_library_that_user_code_misses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "user_code.py").write_text("import lacking_here.part\n\n\ndef handle(inputs): ...\n")
    code = UserCodeConfig(path=str(tmp_path / "user_code.py"), handler="handle")
    record = Block.create(tmp_path / "state", num_engines=1, num_frontends=1).engines[0]
    with pytest.raises(ModelUnusable) as refusal:
        load(code, ModelConfig(path=".", name="m"), record)
    said = unusable(str(refusal.value))
    assert "name lacking_here in a requirements.txt" in said
