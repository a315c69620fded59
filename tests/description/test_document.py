"""The description of the routes, held against the routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi.apis.base.media_types import JSONLINES, SSE
from lmi.description.document import PATHS, document as document_of
from lmi.http.exchange import TIMEOUT, TIMEOUT_MS
from lmi.server.app import ROUTES, SERVER_ROUTES, USER_CODE_ROUTES
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.user_code.options import UserCodeConfig
from tests.scripted import Host, host

CHAT_TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(
        tmp_path_factory.mktemp("described"), model={"chat_template": CHAT_TEMPLATE}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Host) -> dict[str, Any]:
    response, body = server.send("GET", "/openapi.json")
    assert (response.status, response.getheader("content-type")) == (200, "application/json")
    return json.loads(body)  # type: ignore[no-any-return]


def test_every_route_is_described_and_nothing_else(document: dict[str, Any]) -> None:
    described = {
        (path, method.upper()) for path, methods in document["paths"].items() for method in methods
    }
    served = {
        (path.replace(":path}", "}"), method)
        for path, methods, _ in (*SERVER_ROUTES, *ROUTES)
        for method in methods
        if method != "HEAD"
    }
    assert described == served


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    check_references(document)


def check_references(document: dict[str, Any]) -> None:
    for kind, parts in document["components"].items():
        assert (
            set(re.findall(rf'"#/components/{kind}/(\w+)"', json.dumps(document))) == parts.keys()
        )


USER_CODE = UserCodeConfig(path="model.py", handler="handle")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("code", [None, USER_CODE])
def test_generators_of_clients_can_read_it(several: bool, code: UserCodeConfig | None) -> None:
    server = ServerConfig(multi_model=several)
    model = ModelConfig(path=".", name="m")
    document = document_of(
        Config(server=server, model=model, engine=EngineConfig(), user_code=code)
    )
    assert document["openapi"].startswith("3.1.")

    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    ids = [operation["operationId"] for operation in operations]
    assert len({name.rstrip("_") for name in ids}) == len(ids) and all(map(str.isidentifier, ids))

    for part in objects_in(document):
        types = part.get("type", ())
        assert "array" not in types or "items" in part, part
        assert not ("default" in part and (isinstance(types, list) or "anyOf" in part)), part
        assert "itemSchema" not in part, "OpenAPI 3.2's"


def test_each_reason_of_a_failure_is_a_whole_sentence(document: dict[str, Any]) -> None:
    reasons = {
        response["description"]
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, response in operation["responses"].items()
        if int(status) >= 400 and "description" in response
    }
    assert len(reasons) > 10
    sentences = [reason for reason in reasons if reason[0].isupper()]
    assert [sentence for sentence in sentences if not sentence.endswith(".")] == []


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value

    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from objects_in(inner)


def test_the_headers_with_which_a_client_says_how_long_it_waits_are_described(
    document: dict[str, Any],
) -> None:
    for path in PATHS:
        parameters = {
            parameter["name"]: parameter
            for parameter in document["paths"][path]["post"]["parameters"]
        }
        for name in (TIMEOUT, TIMEOUT_MS):
            assert (parameters[name]["in"], parameters[name]["schema"]["exclusiveMinimum"]) == (
                "header",
                0,
            )


def test_the_description_can_be_read(document: dict[str, Any]) -> None:
    num_operations = sum(map(len, document["paths"].values()))
    assert len(json.dumps(document)) < 3_200 * num_operations


def test_every_body_has_a_media_type(document: dict[str, Any]) -> None:
    holders = [
        holder
        for holder in objects_in(document)
        if holder.keys() <= {"description", "headers", "required", "content"}
    ]
    bodies = [holder["content"] for holder in holders if "content" in holder]
    assert len(bodies) > 100 and all("/" in media_type for body in bodies for media_type in body)


def examples(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Path, operation and body of each example of each operation."""
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            parameters = operation.get("parameters", [])
            places = {
                parameter["name"]: parameter["schema"]["enum"][0]
                for parameter in parameters
                if "enum" in parameter["schema"]
            }
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            # Their tests have the engine for it
            if not body or operation["tags"][0] in (
                "adapters",
                "Embeddings",
            ):
                continue

            for schema in body["schema"].get("anyOf", [body["schema"]]):
                example = json.dumps(schemas[schema["$ref"].rpartition("/")[2]]["examples"][0])
                request_body = json.loads(
                    example.replace("What is the capital of France?", "say Paris")
                )
                yield path.format(**places), operation, request_body


def check_examples(server: Host) -> int:
    """Check that each example is answered as described; return the number of examples."""
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(server.send("GET", "/openapi.json")[1])
    all_examples = list(examples(document))
    for path, operation, body in all_examples:
        response, answer = server.post(body, path)
        assert response.status == 200, (path, answer)
        medium = operation["responses"]["200"]["content"][response.getheader("content-type")]
        if "schema" in medium:
            jsonschema.validate(
                json.loads(answer), medium["schema"] | {"components": document["components"]}
            )

    return len(all_examples)


def test_every_example_is_answered_as_described(server: Host) -> None:
    assert check_examples(server) >= 20


@pytest.mark.parametrize("setting", ["tgi_compat", "dynamic_batch"])
def test_examples_fit_the_settings(tmp_path: Path, setting: str) -> None:
    with host(tmp_path, model={"chat_template": CHAT_TEMPLATE, setting: True}) as running:
        assert check_examples(running) >= 20
        document = json.loads(running.send("GET", "/openapi.json")[1])

    check_references(document)


def test_user_code_as_the_model_has_no_other_api() -> None:
    model = ModelConfig(path=".", name="m")
    config = Config(server=ServerConfig(), model=model, engine=EngineConfig(), user_code=USER_CODE)
    described = document_of(config)
    assert {path.replace(":path}", "}") for path, _, _ in USER_CODE_ROUTES} <= described[
        "paths"
    ].keys()
    assert not [path for path in described["paths"] if path.startswith(("/v1", "/v2", "/generate"))]
    check_references(described)


def test_a_server_with_several_models_describes_how_they_are_loaded() -> None:
    server = ServerConfig(multi_model=True)
    described = document_of(
        Config(server=server, model=ModelConfig(path="", name="model"), engine=EngineConfig())
    )
    assert {"404", "409", "507"} <= described["paths"]["/models"]["post"]["responses"].keys()
    [name] = described["paths"]["/models/{model}/invoke"]["post"]["parameters"][:1]
    assert name["schema"] == {"type": "string"}, "no name is known before a model is loaded"
    check_references(described)


@pytest.mark.parametrize(("headers", "media_type"), [({}, JSONLINES), ({"accept": SSE}, SSE)])
def test_a_streamed_completion_at_invocations_is_described_in_each_framing(
    server: Host, document: dict[str, Any], headers: dict[str, str], media_type: str
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    response, answer = server.post({"prompt": "say hi", "stream": True}, headers=headers)
    assert response.getheader("content-type") == media_type

    schema = document["paths"]["/invocations"]["post"]["responses"]["200"]["content"][media_type][
        "x-itemSchema"
    ]
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line]
    assert (lines[-1] == b"[DONE]") == (media_type == SSE)

    if media_type == SSE:
        schema = schema["properties"]["data"]["anyOf"][1]["contentSchema"]

    for line in lines[: -1 if media_type == SSE else None]:
        jsonschema.validate(json.loads(line), schema | {"components": document["components"]})
