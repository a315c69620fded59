"""A large body is read and checked in a thread, so that the event loop has its turns meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest

from lmi.server.respond import LARGE_BODY
from tests.scripted import Host, host

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(
        tmp_path_factory.mktemp("host"), model={"chat_template": "{{ messages[0].content }}"}
    ) as server:
        yield server


def body_of(num_items: int) -> dict[str, object]:
    """A body of many items, of which the last one is refused after all were read and checked."""
    items = [{"type": "message", "role": "user", "content": "say a"}] * num_items
    return {"input": [*items, {"type": "message", "role": "nobody", "content": "say a"}]}


def test_the_event_loop_has_its_turns_while_a_large_body_is_checked(server: Host) -> None:
    body = json.dumps(body_of(60_000)).encode()
    assert len(body) > 20 * LARGE_BODY

    is_over = threading.Event()

    async def longest_turn_s() -> float:
        longest_s = 0.0
        while not is_over.is_set():
            start_s = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - start_s)

        return longest_s

    turns = asyncio.run_coroutine_threadsafe(longest_turn_s(), server.loop)
    start_s = time.perf_counter()
    response, _ = server.post(body, PATH)
    took_s = time.perf_counter() - start_s
    is_over.set()

    assert response.status == 400
    assert turns.result() < took_s / 2
