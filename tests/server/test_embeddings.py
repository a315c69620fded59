"""OpenAI's embeddings over real sockets: answers, refusals on both sides, the queue, clients that
leave, metrics.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import EMBEDDING, Host, host, wait_until

PATH = "/v1/embeddings"
TOO_LONG = (
    "This model's maximum context length is 200 tokens. "
    "However, input must be no longer than the model's context of 200 tokens"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    template: dict[str, object] = {"chat_template": "{{ messages[0].content }}"}
    folder = tmp_path_factory.mktemp("embedding")
    with host(
        folder, model=template, server={"max_request_sequences": 8}, capabilities=EMBEDDING
    ) as served:
        yield served


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("generating")) as served:
        yield served


def ask(server: Host, given: object, path: str = PATH, **fields: object) -> tuple[int, Any]:
    headers = (
        {"X-Amzn-SageMaker-Custom-Attributes": f"route={PATH}"} if path == "/invocations" else None
    )
    response, answer = server.post({"input": given, **fields}, path, headers)
    return response.status, json.loads(answer)


def numbers(text: str) -> list[float]:
    return list(map(float, text.encode()[:4]))


def test_texts_and_ids_are_embedded_in_their_order(server: Host) -> None:
    texts = ["embed a", "embed bc", "embed def"]
    for inputs in (texts, [list(text.encode()) for text in texts]):
        status, answer = ask(server, inputs)
        assert status == 200, answer
        assert answer["data"] == [
            {"object": "embedding", "index": n, "embedding": numbers(text)}
            for n, text in enumerate(texts)
        ]
        assert (answer["object"], answer["model"]) == ("list", "scripted")
        assert answer["usage"] == {"prompt_tokens": 24, "total_tokens": 24}


def test_base64_has_the_bytes_of_float32(server: Host) -> None:
    _, answer = ask(server, "embed a", encoding_format="base64", dimensions=3)
    assert struct.unpack("<3f", base64.b64decode(answer["data"][0]["embedding"])) == tuple(
        numbers("embed a")[:3]
    )


def test_the_answer_is_as_described(server: Host) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(server.send("GET", "/openapi.json")[1])
    described = document["paths"][PATH]["post"]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    for form in ("float", "base64"):
        _, answer = ask(server, ["embed a", "embed b"], encoding_format=form)
        jsonschema.validate(answer, described | {"components": document["components"]})


def test_invocations_embeds_where_the_route_says_so(server: Host) -> None:
    assert ask(server, "embed a", "/invocations")[1] == ask(server, "embed a")[1]


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"input": ""}, "input must be a non-empty string", "input"),
        ({"input": "embed " + "a" * 200}, TOO_LONG, "input"),
        ({"input": [9, 300]}, "input must be token ids from 0 to 256, given 300", "input"),
        (
            {"input": ["embed a"] * 9},
            "input must be at most 8 prompts (max_request_sequences)",
            "input",
        ),
        (
            {"input": "embed a", "dimensions": 5},
            "dimensions must be at most 4, given 5",
            "dimensions",
        ),
    ],
)
def test_a_refusal_names_the_field_in_openai_s_form(
    server: Host, fields: dict[str, object], said: str, param: str
) -> None:
    response, answer = server.post(fields, PATH)
    error = json.loads(answer)["error"]
    assert response.status == 400 and error["message"].startswith(said), error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_model_that_generates_refuses_embeddings(generating: Host) -> None:
    status, answer = ask(generating, "say a")
    message = (
        "model is not supported here: scripted has a model that generates text and gives no "
        "embeddings "
        "(docs/apis.md#embeddings: how it may)"
    )
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": "model",
        "code": "unsupported",
    }

    assert (status, answer) == (400, {"error": error})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "say a"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say a"}]}, 400),
        ("/generate", {"inputs": "say a"}, 422),
    ],
)
def test_an_embedding_model_refuses_generation(
    server: Host, path: str, body: dict[str, object], status: int
) -> None:
    response, answer = server.post(body, path)
    assert response.status == status
    assert (
        b"this is an embedding model, which answers at /v1/embeddings and generates no text"
        in answer
    )


def test_a_failure_of_one_input_ends_the_answer(server: Host) -> None:
    status, answer = ask(server, ["hang", "fail", "embed a"])
    assert (status, answer["error"]["message"]) == (500, "the script says so")
    wait_until(lambda: server.executor.num_active == 0)


def test_a_client_that_leaves_frees_the_engine(server: Host) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", PATH, json.dumps({"input": ["hang", "hang"]}))
    wait_until(lambda: server.executor.num_active == 2)
    connection.close()
    wait_until(lambda: server.executor.num_active == 0)


def test_metrics_count_prompts_and_no_generated_tokens(server: Host) -> None:
    before = metrics(server)
    ask(server, ["embed a", "embed b"])
    after = metrics(server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["lmi_prompt_tokens_total"] == 14 and grown["lmi_generated_tokens_total"] == 0
    assert grown["lmi_request_duration_seconds_count"] == 1


def metrics(server: Host) -> dict[str, float]:
    lines = server.send("GET", "/metrics")[1].decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in pairs}


# LMI's schema.


def invoke(server: Host, body: dict[str, object], path: str = "/invocations") -> tuple[int, Any]:
    response, answer = server.post(body, path)
    assert answer.endswith(b"\n")
    return response.status, json.loads(answer)


def unit(text: str) -> list[float]:
    length = math.sqrt(sum(number**2 for number in numbers(text)))
    return [number / length for number in numbers(text)]


@pytest.mark.parametrize(
    "path", ["/invocations", "/predictions/scripted", "/models/scripted/invoke"]
)
@pytest.mark.parametrize("inputs", ["embed a", ["embed a"], ["embed a", "embed bc", "embed def"]])
def test_lmi_s_body_is_answered_with_a_list_of_normalised_vectors(
    server: Host, path: str, inputs: Any
) -> None:
    texts = [inputs] if isinstance(inputs, str) else inputs
    status, answer = invoke(server, {"inputs": inputs}, path)
    assert (status, answer) == (200, [pytest.approx(unit(text)) for text in texts])


def test_vectors_are_as_the_model_gives_them_where_the_option_or_the_request_says_so(
    server: Host, tmp_path: Path
) -> None:
    body = {"inputs": "embed a", "parameters": {"normalize": False}}
    assert invoke(server, body) == (200, [numbers("embed a")])

    with host(tmp_path, model={"normalize": False}, capabilities=EMBEDDING) as raw:
        assert invoke(raw, {"inputs": "embed a"}) == (200, [numbers("embed a")])

        again = invoke(raw, {"inputs": "embed a", "parameters": {"normalize": True}})
        assert again == (200, [pytest.approx(unit("embed a"))])


def test_a_plain_text_and_lines_are_embedded_too(server: Host) -> None:
    response, answer = server.send(
        "POST", "/invocations", b"embed a", {"Content-Type": "text/plain"}
    )
    assert (response.status, json.loads(answer)) == (200, [pytest.approx(unit("embed a"))])
    lines = b'{"inputs": "embed a"}\n{"inputs": ["embed bc", "embed a"]}'
    response, answer = server.send(
        "POST", "/invocations", lines, {"Content-Type": "application/jsonlines"}
    )
    assert [len(json.loads(line)) for line in answer.splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"inputs": ""}, "inputs must be a non-empty string or a list"),
        ({"inputs": []}, "inputs must be a non-empty string or a list"),
        ({"inputs": ["embed a", 5]}, "inputs must be a non-empty string or a list"),
        (
            {"inputs": "embed a", "stream": True},
            "stream is not supported here: embeddings come whole",
        ),
        (
            {"inputs": "embed a", "parameters": {"normalize": 1}},
            "parameters.normalize must be true or false",
        ),
        (
            {"inputs": "embed a", "parameters": {"truncate": 5}},
            "parameters.truncate is not supported here",
        ),
        (
            {"inputs": "embed a", "parameters": {"dimensions": 5}},
            "parameters.dimensions must be at most 4",
        ),
        ({"inputs": "embed " + "a" * 200}, "inputs must be"),
        ({"inputs": "embed a", "adapters": "poetic"}, "adapters is not supported here"),
    ],
)
def test_a_refusal_of_lmi_s_body_names_the_field_in_lmi_s_form(
    server: Host, body: dict[str, object], said: str
) -> None:
    status, answer = invoke(server, body)
    assert (status, answer["code"], answer["error"].startswith(said)) == (424, 424, True), answer
