"""What the supervisor decides without a process: threads, secrets, words. The processes are in tests/system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi.announce import HINTS, Failure, banner, say_failed, say_ready
from lmi.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.engine.worker import LoadReport
from lmi.executor import EngineInfo
from lmi.launcher import num_engine_threads, without_secrets

REPORT = LoadReport(
    EngineInfo(name="echo", vocab_size=9, max_sequence_length=512, max_num_sequences=4, dtype="fp32", device="cpu"),
    {"weights": 1.25, "warm-up": 0.5},
)


def config(log_format: str = "json", host: str = "0.0.0.0") -> Config:
    server = ServerConfig(host=host, port=8080, log_format=log_format)
    return Config(server=server, model=ModelConfig(path="/models/fox", name="fox"), engine=EngineConfig())


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"]
    + ["DB_PASSWORD", "OPENAI_API_KEY", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "aws_secret_access_key"],
)
def test_a_secret_is_kept_from_front_ends(name: str) -> None:
    assert without_secrets({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "LMI_RUNTIME_DIR", "AWS_REGION", "KEYMAP"])
def test_what_is_no_secret_stays(name: str) -> None:
    assert without_secrets({name: "x"}) == {name: "x"}


def test_a_small_model_leaves_a_core_to_the_front_end_and_a_big_one_takes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmi.processes.num_usable_cores", lambda: 8)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"small")
    assert num_engine_threads(EngineConfig(), str(tmp_path)) == 7
    with open(weights, "ab") as file:
        file.truncate(65 << 20)
    assert num_engine_threads(EngineConfig(), str(tmp_path)) == 8
    assert num_engine_threads(EngineConfig(num_engines=3), str(tmp_path)) == 2
    assert num_engine_threads(EngineConfig(num_threads=5), str(tmp_path)) == 5
    monkeypatch.setattr("lmi.processes.num_usable_cores", lambda: 1)
    assert num_engine_threads(EngineConfig(num_engines=3), str(tmp_path)) == 1


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


def test_the_last_words_are_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    say_failed(Failure(code=4, cause="model_unusable", stage="weights", message="line one\nline two"))
    [line] = capsys.readouterr().err.splitlines()
    words = json.loads(line)
    assert words["hint"] == HINTS["model_unusable"] and words["message"] == "line one\nline two"
