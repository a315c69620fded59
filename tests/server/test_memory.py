"""No request leaves anything behind in a front end, whichever API it asks and whether it is
answered or refused.

The bytes are those that Python's allocator still holds for the code of lmi and its libraries after
a collection.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmi.apis.table import APIS
from tests.scripted import EMBEDDING, Host, host

NUM_WARM = 20
NUM_MEASURED = 40
MAX_KEPT_BYTES = 250
"""A request. A single reader that a table keeps has 1,250."""

NUM_MESSAGES = 12
TEXT = "say hi"
TURNS = [
    {"role": "assistant" if number % 2 else "user", "content": f"turn {number}"}
    for number in range(NUM_MESSAGES)
]
CHAT = [*TURNS, {"role": "user", "content": TEXT}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "parameters": SCHEMA}
PNG = "iVBORw0KGgo="
PARTS_OF_RESPONSES = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}
]


@dataclass(frozen=True)
class Asked:
    """A request of an API, and the status of its answer."""

    api: str
    path: str
    body: dict[str, Any]
    status: int = 200


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": CHAT, "max_tokens": 4, **fields}


def image_of(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}


ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}
OPENAI_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
ASKED = {
    "lmi": Asked(
        "lmi", "/invocations", {"inputs": TEXT, "parameters": {"seed": 3, "do_sample": True}}
    ),
    "lmi, a stream": Asked("lmi", "/invocations", {"inputs": TEXT, "stream": True}),
    "lmi, refused": Asked("lmi", "/invocations", {"inputs": TEXT, "parameters": {"top_p": 5}}, 424),
    "lmi, unknown names": Asked(
        "lmi", "/invocations", {"inputs": TEXT, "parameters": {"wholly": 1}}
    ),
    "lmi, a guide": Asked(
        "lmi", "/invocations", {"inputs": TEXT, "parameters": {"guided_json": SCHEMA}}, 424
    ),
    "tgi": Asked("tgi", "/", {"inputs": TEXT}),
    "tgi, whole": Asked(
        "tgi_generate", "/generate", {"inputs": TEXT, "parameters": {"details": True}}
    ),
    "tgi, a stream": Asked("tgi_generate_stream", "/generate_stream", {"inputs": TEXT}),
    "tgi, refused": Asked(
        "tgi_generate",
        "/generate",
        {"inputs": TEXT, "parameters": {"grammar": {"type": "odd", "value": ""}}},
        422,
    ),
    "completions": Asked("openai_completions", "/v1/completions", {"prompt": TEXT, "logprobs": 2}),
    "completions, a stream": Asked(
        "openai_completions", "/v1/completions", {"prompt": TEXT, "stream": True}
    ),
    "completions, refused": Asked(
        "openai_completions", "/v1/completions", {"prompt": TEXT, "stop": [""]}, 400
    ),
    "completions, lines": Asked(
        "openai_completions_lines", "/invocations", {"prompt": TEXT, "stream": True}
    ),
    "chat": Asked("openai_chat", "/v1/chat/completions", chat(logprobs=True, top_logprobs=2)),
    "chat, a stream": Asked("openai_chat", "/v1/chat/completions", chat(stream=True)),
    "chat, an unknown role": Asked(
        "openai_chat",
        "/v1/chat/completions",
        {"messages": [*CHAT, {"role": "user\n", "content": "a"}]},
        400,
    ),
    "chat, a tool": Asked(
        "openai_chat",
        "/v1/chat/completions",
        chat(tools=[{"type": "function", "function": TOOL}], tool_choice="required"),
        400,
    ),
    "chat, a format": Asked(
        "openai_chat",
        "/v1/chat/completions",
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": SCHEMA},
            }
        ),
        400,
    ),
    "chat, an image": Asked("openai_chat", "/v1/chat/completions", image_of(OPENAI_IMAGE), 400),
    "chat, lines": Asked("openai_chat_lines", "/invocations", chat(stream=True)),
    "messages": Asked("anthropic", "/v1/messages", chat()),
    "messages, a stream": Asked(
        "anthropic", "/v1/messages", chat(stream=True, thinking={"type": "disabled"})
    ),
    "messages, refused": Asked("anthropic", "/v1/messages", chat(tool_choice={"type": "odd"}), 400),
    "messages, a format": Asked(
        "anthropic",
        "/v1/messages",
        chat(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        400,
    ),
    "messages, an image": Asked("anthropic", "/v1/messages", image_of(ANTHROPIC_IMAGE), 400),
    "messages, counted": Asked("anthropic", "/v1/messages/count_tokens", {"messages": CHAT}),
    "responses": Asked("responses", "/v1/responses", {"input": PARTS_OF_RESPONSES}),
    "responses, a stream": Asked(
        "responses", "/v1/responses", {"input": PARTS_OF_RESPONSES, "stream": True}
    ),
    "responses, refused": Asked(
        "responses", "/v1/responses", {"input": CHAT, "text": {"format": {"type": "odd"}}}, 400
    ),
    "triton": Asked(
        "triton", "/v2/models/scripted/generate", {"text_input": TEXT, "stop_words": ["q"]}
    ),
    "triton, a stream": Asked(
        "triton_stream", "/v2/models/scripted/generate_stream", {"text_input": TEXT}
    ),
    "triton, refused": Asked(
        "triton", "/v2/models/scripted/generate", {"text_input": TEXT, "top_p": 7}, 400
    ),
    "no route": Asked("", "/v1/nothing", {}, 404),
}
EMBEDDINGS = {
    "embeddings": Asked("embeddings", "/v1/embeddings", {"input": "embed hi"}),
    "embeddings, refused": Asked(
        "embeddings", "/v1/embeddings", {"input": ["embed hi"], "dimensions": -1}, 400
    ),
}
TEMPLATE = "{{ messages[-1]['content'] }}"


def test_every_api_is_asked() -> None:
    only_without_a_rolling_batch = {"dynamic_batch"}
    apis_asked = {case.api for case in (*ASKED.values(), *EMBEDDINGS.values())}
    assert set(APIS) <= apis_asked | only_without_a_rolling_batch


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("server"), model={"chat_template": TEMPLATE}) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("embedder"), capabilities=EMBEDDING) as running:
        yield running


@pytest.mark.parametrize("name", ASKED)
def test_a_request_leaves_nothing_behind(server: Host, name: str) -> None:
    assert kept_bytes(server, ASKED[name]) <= MAX_KEPT_BYTES


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_an_embedding_leaves_nothing_behind(embedder: Host, name: str) -> None:
    assert kept_bytes(embedder, EMBEDDINGS[name]) <= MAX_KEPT_BYTES


def kept_bytes(server: Host, asked: Asked) -> float:
    """Return the bytes that stay of each request. Prints the lines of code that they come from."""
    for _ in range(NUM_WARM):
        response, answer = server.post(asked.body, asked.path)
        assert response.status == asked.status, answer

    tracemalloc.start()
    try:
        before = snapshot(server)
        for _ in range(NUM_MEASURED):
            server.post(asked.body, asked.path)

        after = snapshot(server)
    finally:
        tracemalloc.stop()

    growth = after.compare_to(before, "lineno")
    print(*growth[:5], sep="\n")
    # what grows with the requests, and not by a buffer that is larger now
    return (
        sum(line.size_diff for line in growth if line.count_diff >= NUM_MEASURED // 2)
        / NUM_MEASURED
    )


def snapshot(server: Host) -> tracemalloc.Snapshot:
    # the scripted engine keeps each request for the tests that look at them
    server.executor.requests.clear()
    gc.collect()

    # an event loop keeps the handles of timers that were cancelled, until they are half of all
    patterns = (
        f"{Path(__file__).parents[1]}/*",
        tracemalloc.__file__,
        f"{Path(asyncio.__file__).parent}/*",
    )
    filters = [
        tracemalloc.Filter(inclusive=False, filename_pattern=pattern) for pattern in patterns
    ]
    return tracemalloc.take_snapshot().filter_traces(filters)
