"""A model's own defaults on a whole front end: what the engine is asked, and where the defaults are
told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmi.executor import SamplingConfig
from lmi.settings.config import GenerationDefaults
from tests.scripted import CAPABILITIES, Host, host

DEFAULTS = GenerationDefaults(
    temperature=0.6,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.05,
    max_new_tokens=4,
    source="generation_config.json",
)
OF_MAKER = SamplingConfig(temperature=0.6, top_k=20, min_p=0.05, repetition_penalty=1.05)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SAID = "say Hello"
CHAT = {"messages": [{"role": "user", "content": SAID}]}
ROUTE = "X-Amzn-SageMaker-Custom-Attributes"
# What a client sends who says nothing of sampling, by the API that answers.
SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"prompt": SAID}),
    "responses": ("/v1/responses", {"input": SAID}),
    "messages": ("/v1/messages", CHAT | {"max_tokens": 9}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lmi": ("/invocations", {"inputs": SAID}),
    "tgi": ("/generate", {"inputs": SAID}),
    "triton": ("/v2/models/scripted/generate", {"text_input": SAID}),
}


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    model = {"generation_defaults": DEFAULTS, "chat_template": TEMPLATE}
    with host(tmp_path_factory.mktemp("defaults"), model=model) as running:
        yield running


def asked(lmi: Host, path: str, body: dict[str, Any], **headers: str) -> SamplingConfig:
    response, answer = lmi.post(body, path, headers)
    assert response.status == 200, answer
    return lmi.executor.requests[-1].sampling_config


@pytest.mark.parametrize("name", SILENT)
def test_the_engine_gets_the_models_defaults_of_a_silent_request(lmi: Host, name: str) -> None:
    path, body = SILENT[name]
    assert asked(lmi, path, body) == OF_MAKER
    assert asked(lmi, "/invocations", body, **{ROUTE: f"route={path}"}) == OF_MAKER
    assert lmi.executor.requests[-1].max_tokens == {"completions": 16, "messages": 9}.get(name, 4)


@pytest.mark.parametrize("name", SILENT)
def test_the_engine_gets_what_the_client_wrote(lmi: Host, name: str) -> None:
    path, body = SILENT[name]
    assert asked(lmi, path, body | {"temperature": 1}) == SamplingConfig(
        top_k=20, min_p=0.05, repetition_penalty=1.05
    )
    assert asked(lmi, path, body | {"temperature": 0}) == SamplingConfig(
        temperature=0.0, repetition_penalty=1.05
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_apis_are_greedy_as_their_documents_say(lmi: Host, name: str) -> None:
    assert asked(lmi, *OTHERS[name]) == SamplingConfig(temperature=0.0)


def test_a_body_at_invocations_is_read_by_the_rule_of_its_api(lmi: Host) -> None:
    assert asked(lmi, "/invocations", CHAT) == OF_MAKER
    assert asked(lmi, "/invocations", {"prompt": SAID}) == OF_MAKER


def test_the_defaults_are_told_where_people_and_machines_look(lmi: Host) -> None:
    info = json.loads(lmi.send("GET", "/server_info")[1])
    defaults_told = info["models"]["scripted"]["model"]["generation_defaults"]
    assert defaults_told == msgspec.to_builtins(DEFAULTS)
    tags = json.loads(lmi.send("GET", "/openapi.json")[1])["tags"]
    telling = {
        tag["name"] for tag in tags if "temperature 0.6, top_k 20, min_p 0.05" in tag["description"]
    }
    assert telling == {"OpenAI", "Responses", "Anthropic"}


def test_no_request_is_refused_for_a_default_that_the_engine_lacks(tmp_path: Path) -> None:
    lacking = msgspec.structs.replace(
        CAPABILITIES, min_p=False, penalties=False, max_temperature=0.5
    )
    model = {"generation_defaults": DEFAULTS, "chat_template": TEMPLATE}
    with host(tmp_path, model=model, capabilities=lacking) as lmi:
        path, body = SILENT["chat"]
        assert asked(lmi, path, body) == SamplingConfig(temperature=0.5, top_k=20)
        response, answer = lmi.post(body | {"min_p": 0.05}, path)
        assert response.status == 400 and b"min_p" in answer


def test_the_operators_number_of_tokens_bounds_every_api(tmp_path: Path) -> None:
    bounded = GenerationDefaults(max_new_tokens=3, server_max_new_tokens=3)
    with host(tmp_path, model={"generation_defaults": bounded, "chat_template": TEMPLATE}) as lmi:
        for path, body in (SILENT | OTHERS).values():
            asked(lmi, path, body)
            assert lmi.executor.requests[-1].max_tokens == 3, path

        asked(lmi, "/v1/chat/completions", CHAT | {"max_tokens": 2})
        assert lmi.executor.requests[-1].max_tokens == 2
