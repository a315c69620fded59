"""A large body is read and checked in a thread, so that the event loop has its turns meanwhile, and
not at all where its client has left.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from lmi.server.front_end import NUM_READERS
from lmi.server.respond import LARGE_BODY
from tests.scripted import Host, host, wait_until

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


def test_a_large_body_whose_client_has_left_is_not_read(server: Host) -> None:
    body = json.dumps(body_of(10_000)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    record = server.server_block.frontends[0]
    reading = server.front_end.reading

    async def take_all_turns() -> None:
        for _ in range(NUM_READERS):
            await reading.acquire()

    asyncio.run_coroutine_threadsafe(take_all_turns(), server.loop).result()
    before = ends(server)
    with socket.create_connection(("127.0.0.1", server.port), 60) as leaving:
        leaving.sendall(head.encode() + body)
        wait_until(lambda: record.num_body_bytes == len(body))

    try:
        wait_until(lambda: ends(server) != before)
    finally:
        for _ in range(NUM_READERS):
            server.loop.call_soon_threadsafe(reading.release)

    assert ends(server) - before == Counter({"499": 1}), "reading it would have found its fault"
    assert record.num_body_bytes == 0


def ends(server: Host) -> Counter[str]:
    """How many requests ended with 400, and how many with 499 since their client had left."""
    text = server.send("GET", "/metrics")[1].decode()
    counts = re.findall(r'^lmi_requests_total\{.*code="(400|499)".*\} (\d+)', text, re.MULTILINE)
    return Counter({code: int(count) for code, count in counts})
