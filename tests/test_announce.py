"""What the supervisor tells people."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmi.announce import HINTS, Failure, banner, say_failed, say_ready
from lmi.config import CodeConfig, Config, EngineConfig, ModelConfig, ServerConfig
from lmi.engine.worker import LoadReport
from lmi.executor import EngineInfo

REPORT = LoadReport(
    EngineInfo(name="echo", vocab_size=9, max_sequence_length=512, max_num_sequences=4, dtype="fp32", device="cpu"),
    {"weights": 1.25, "warm-up": 0.5},
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


def test_a_handler_is_announced_by_its_file_and_has_no_context_length(capsys: pytest.CaptureFixture[str]) -> None:
    custom = replace(config("text"), code=CodeConfig(path="/models/fox/model.py", handler="handle"))
    assert "handle in /models/fox/model.py" in banner(custom, 8080, REPORT, after_s=2.0)
    say_ready(replace(custom, server=config().server), 8080, REPORT, after_s=2.0)
    assert json.loads(capsys.readouterr().out)["max_sequence_length"] is None


def test_the_last_words_are_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    say_failed(Failure(code=4, cause="model_unusable", stage="weights", message="line one\nline two"))
    [line] = capsys.readouterr().err.splitlines()
    words = json.loads(line)
    assert words["hint"] == HINTS["model_unusable"] and words["message"] == "line one\nline two"
