"""The description of the routes, held against the routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lmi.server.app import ROUTES
from lmi.server.routes.docs import PAGE
from tests.scripted import Host, host

CHAT_TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("described"), model={"chat_template": CHAT_TEMPLATE}) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Host) -> dict[str, Any]:
    response, body = server.send("GET", "/openapi.json")
    assert (response.status, response.getheader("content-type")) == (200, "application/json")
    return json.loads(body)  # type: ignore[no-any-return]


def test_every_route_is_described_and_nothing_else(document: dict[str, Any]) -> None:
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    served = {
        (path.replace(":path}", "}"), method) for path, methods, _ in ROUTES for method in methods if method != "HEAD"
    }
    assert described == served


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for kind, parts in document["components"].items():
        assert set(re.findall(rf'"#/components/{kind}/(\w+)"', json.dumps(document))) == parts.keys()


def test_the_description_can_be_read(document: dict[str, Any]) -> None:
    assert len(json.dumps(document)) < 120_000


def test_every_example_is_answered_as_described(document: dict[str, Any], server: Host) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    num_examples = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is None:
                continue
            places = {each["name"]: each["schema"]["enum"][0] for each in operation.get("parameters", [])}
            example = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]["examples"][0]
            said = json.loads(json.dumps(example).replace("What is the capital of France?", "say Paris"))
            response, answer = server.post(said, path.format(**places))
            described = operation["responses"][str(response.status)]["content"]
            assert response.status == 200, (method, path, answer)
            medium = described[response.getheader("content-type")]
            if "schema" in medium:
                jsonschema.validate(json.loads(answer), medium["schema"] | {"components": document["components"]})
            num_examples += 1
    assert num_examples >= 4


def test_the_page_loads_nothing_from_elsewhere_and_may_run_only_what_is_in_it(server: Host) -> None:
    response, body = server.send("GET", "/docs")
    assert response.status == 200 and body == PAGE
    assert response.getheader("content-type") == "text/html; charset=utf-8"
    assert not re.search(rb"https?://|src=|@import|\burl\(", body)
    policy = str(response.getheader("content-security-policy"))
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert re.findall(rb'fetch\("(.*?)"\)', body) == [b"openapi.json"]
