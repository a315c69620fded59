"""The lines that the supervisor writes for people."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs

from lmi.runtime import LoadReport
from lmi.settings.annexes import KEYS
from lmi.settings.config import Config, EngineConfig, GenerationDefaults, ModelConfig, ServerConfig
from lmi.supervisor.child import Failure
from lmi.supervisor.hints import OPTIONS
from lmi.supervisor.messages import banner, say_failed, say_ready, say_ready_for_models
from lmi.user_code.options import UserCodeConfig

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
    return Config(
        server=server, model=ModelConfig(path="/models/fox", name="fox"), engine=EngineConfig()
    )


def test_the_banner_names_the_port_of_management_for_what_it_has() -> None:
    text = banner(
        replace(config("text"), server=ServerConfig(management_port=8082)),
        8081,
        REPORT,
        after_s=2.0,
    )
    assert (
        "127.0.0.1:8082/docs" in text
        and "127.0.0.1:8082/metrics" in text
        and "127.0.0.1:8081/playground" in text
    )


def test_the_command_that_it_shows_is_let_in_where_the_server_has_a_certificate_and_keys() -> None:
    guarded = ServerConfig(ssl_certfile="/tls.crt", api_keys=KEYS.parse("sk-one"))
    text = banner(replace(config("text"), server=guarded), 8080, REPORT, after_s=2.0)
    assert (
        "  curl -k -H 'Authorization: Bearer KEY' https://127.0.0.1:8080/invocations -d '{" in text
    )
    assert "sk-one" not in text


def test_an_embedding_model_is_announced_by_what_it_answers() -> None:
    text = banner(config("text"), 8080, structs.replace(REPORT, gives_embeddings=True), after_s=2.0)
    assert (
        """  curl http://127.0.0.1:8080/v1/embeddings -d '{"input": "a text about a fox"}'\n"""
        in text
    )
    assert "/invocations" not in text and "/playground" not in text


def test_a_server_for_several_models_shows_how_one_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = ServerConfig(host="::1", model_store="/store", management_port=8082, log_format="text")
    say_ready_for_models(server, 8080, after_s=2.0)
    output = capsys.readouterr().out
    assert output.startswith("\nlmi is ready for models below /store\n")
    assert (
        """  curl http://[::1]:8082/models -d '{"model_name": "NAME", "url": "FOLDER"}'\n"""
        in output
    )


def test_ready_is_one_json_event_where_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    say_ready(config(), 8080, REPORT, after_s=2.0)
    event = json.loads(capsys.readouterr().out)

    assert (event["event"], event["model"], event["port"]) == ("ready", "fox", 8080)
    assert event["stages_s"] == {"weights": 1.25, "warm-up": 0.5}


def test_what_counts_where_a_request_is_silent_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = GenerationDefaults(
        temperature=0.6, top_k=20, max_new_tokens=512, source="generation_config.json"
    )
    model = ModelConfig(path="/models/fox", name="fox", generation_defaults=defaults)
    text = banner(replace(config("text"), model=model), 8080, REPORT, after_s=2.0)

    assert (
        "\n  defaults temperature 0.6, top_k 20, max_new_tokens 512 (generation_config.json)\n"
        in text
    )

    assert "defaults" not in banner(config("text"), 8080, REPORT, after_s=2.0)

    say_ready(replace(config(), model=model), 8080, REPORT, after_s=2.0)
    event = json.loads(capsys.readouterr().out)

    assert event["generation_defaults"] == {"temperature": 0.6, "top_k": 20, "max_new_tokens": 512}


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("h", "h")]
)
def test_the_banner_has_urls_that_work_from_this_machine(host: str, url: str) -> None:
    text = banner(config("text", host), 8081, REPORT, after_s=2.0)
    assert f"http://{url}:8081/playground, http://{url}:8081/docs" in text
    assert f"http://{url}:8081/v1 is the base_url" in text
    for path in ("ping", "invocations", "metrics"):
        assert f"http://{url}:8081/{path}" in text

    assert "weights 1.2, warm-up 0.5" in text and "512 tokens" in text


def test_what_computes_is_told_where_an_engine_has_a_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    native = structs.replace(REPORT, kernels="native x86-64-v4")
    assert "echo, cpu, fp32, native x86-64-v4 kernels\n" in banner(
        config("text"), 8080, native, after_s=2.0
    )
    assert "echo, cpu, fp32\n" in banner(config("text"), 8080, REPORT, after_s=2.0)
    say_ready(config(), 8080, native, after_s=2.0)
    assert json.loads(capsys.readouterr().out)["kernels"] == "native x86-64-v4"


@pytest.mark.parametrize(
    ("asked", "runs", "said"),
    [
        ("fp16", "float32", "cpu, float32 in place of float16\n"),
        ("auto", "float32", "cpu, float32\n"),
    ],
)
def test_another_type_than_the_one_that_was_asked_for_is_told(
    asked: str, runs: str, said: str
) -> None:
    text_config = replace(config("text"), engine=EngineConfig(dtype=asked))
    assert said in banner(text_config, 8080, structs.replace(REPORT, dtype=runs), after_s=2.0)


def test_a_handler_is_announced_by_its_file_and_has_no_context_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fox = replace(
        config("text"), user_code=UserCodeConfig(path="/models/fox/model.py", handler="handle")
    )
    text = banner(fox, 8080, REPORT, after_s=2.0)

    assert (
        "  model    fox\n  code     handle in /models/fox/model.py, one request at a time\n" in text
    )
    assert "/v1" not in text and "/playground" not in text
    assert (
        text.endswith("/invocations -d @FILE    # FILE holds what handle reads\n")
        and "context" not in text
    )

    report = LoadReport(engine="model.py", stages_s={"load": 0.5})
    say_ready(replace(fox, server=config().server), 8080, report, after_s=2.0)

    assert json.loads(capsys.readouterr().out)["max_sequence_length"] is None


def test_the_last_words_are_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    say_failed(
        Failure(code=2, cause="bad_configuration", stage="weights", message="line one\nline two")
    )
    [line] = capsys.readouterr().err.splitlines()
    words = json.loads(line)
    assert words["hint"] == OPTIONS and words["message"] == "line one\nline two"


def test_the_last_words_are_text_where_the_log_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    say_failed(
        Failure(code=2, cause="bad_configuration", stage="weights", message="one\ntwo\x1b[2J"),
        "text",
    )
    assert capsys.readouterr().err.splitlines() == [
        "lmi: one",
        "lmi: two\\u001b[2J",
        f"     {OPTIONS}",
    ]


def test_a_fault_without_a_hint_says_its_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(
        code=4, cause="model_unusable", stage="download", message="a/b: /disk is full"
    )
    say_failed(failure, "text")
    assert capsys.readouterr().err == "lmi: a/b: /disk is full\n"
    say_failed(failure)
    assert "hint" not in json.loads(capsys.readouterr().err)
