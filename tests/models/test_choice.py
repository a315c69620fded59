"""Which of several models a body means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lmi.http.exchange import Exchange
from lmi.models.choice import name_in_body
from lmi.runtime import ServerRuntime
from lmi.server.front_end import FrontEnd
from lmi.settings.config import ServerConfig
from lmi.shared.state import Phase


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    runtime = ServerRuntime.create(ServerConfig())
    block = runtime.attach()
    block.supervisor.phase = Phase.READY
    yield FrontEnd(runtime, block, block.frontends[0])
    runtime.remove()


def exchange(body: bytes, path: str) -> Exchange:
    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    return Exchange({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "b", "prompt": "a"}', "b"),
        (b'{"model": "b", "messages": []}', "b"),
        (b'{"model": "b", "inputs": null, "prompt": "a"}', "b"),
        (b'{"model": "b", "prompt": null}', None),
        (b'{"model": "b", "inputs": "a"}', None),
        (b'{"model": "b", "inputs": "a", "prompt": "a"}', None),
        (b'{"model": "b"}', None),
        (b'{"model": 5, "prompt": "a"}', None),
        (b'{"model": "tgi", "prompt": "a"}', None),
        (b'{"model": "\xff", "prompt": "a"}', None),
        (b'{"model": "b", "prompt": ', None),
        (b"[" * 5000, None),
        (b"", None),
    ],
)
def test_a_body_names_its_model_where_openais_schemas_read_it(
    front_end: FrontEnd, body: bytes, name: str | None
) -> None:
    assert asyncio.run(name_in_body(exchange(body, "/invocations"), front_end)) == name


def test_a_body_of_openais_paths_names_its_model_whatever_else_it_has(front_end: FrontEnd) -> None:
    assert (
        asyncio.run(name_in_body(exchange(b'{"model": "b"}', "/v1/completions"), front_end)) == "b"
    )
