"""One call to a container: how its answer is read, and what is known of an answer that does not
come whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lmi.gateway.container import Container, OutOfTime, ResponseCut, Unreachable
from lmi.gateway.watched_container import WatchedContainer
from tests.gateway.gateways import ScriptedContainer, Talk, chunked, scripted, then_silent, whole
from tests.system.container import free_port

Call = Callable[[Container], Coroutine[Any, Any, Any]]


def run(call: Call, container: ScriptedContainer) -> Any:
    return asyncio.run(call(Container(container.url)))


async def read(container: Container, timeout_s: float = 10.0) -> bytes:
    async with container.call("POST", "/invocations", [("A", "b")], b"body", timeout_s) as answer:
        return await answer.read()


async def chunks(container: Container) -> list[bytes]:
    async with container.call("POST", "/invocations") as answer:
        received = []
        while chunk := await answer.receive():
            received.append(chunk)

        return received


def in_pieces(*pieces: bytes) -> Callable[[Talk], None]:
    """An answer whose bytes arrive in these pieces."""

    def answer(talk: Talk) -> None:
        for piece in pieces:
            talk.send(piece)
            time.sleep(0.02)

    return answer


def test_a_call_is_one_request_with_its_own_host_and_length() -> None:
    with scripted(whole(b"hello")) as container:
        assert run(read, container) == b"hello"
        assert asyncio.run(read(Container(container.url + "/a/b/"))) == b"hello"

    first, second = container.seen
    assert (first.method, first.path, first.body) == ("POST", "/invocations", b"body")
    assert first.headers == [
        ("Host", container.url.removeprefix("http://")),
        ("A", "b"),
        ("Content-Length", "4"),
    ]
    assert second.path == "/a/b/invocations"


def test_status_and_headers_are_there_before_the_body() -> None:
    async def look(container: Container) -> None:
        async with container.call("POST", "/", timeout_s=5) as answer:
            assert (answer.status, answer.is_chunked) == (200, True)
            assert (
                answer.header("content-type") == "application/jsonlines"
                and answer.header("other") == ""
            )

    with scripted(then_silent(chunked(end=b""))) as container:
        run(look, container)
        assert container.left.wait(60)


def test_a_chunk_that_arrives_in_pieces_is_one_and_chunks_that_arrive_together_are_two() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with scripted(
        in_pieces(head + b"5", b"\r\nhe", b"llo", b"\r\n1\r\na\r\n1\r\nb\r\n0\r", b"\n\r\n")
    ) as container:
        assert run(chunks, container) == [b"hello", b"a", b"b"]


def test_an_interim_answer_is_passed_over() -> None:
    early = (
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    )
    with scripted(in_pieces(early)) as container:
        assert run(read, container) == b"hi"


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_has_no_body_is_whole(status: int) -> None:
    with scripted(
        then_silent(lambda talk: talk.send(b"HTTP/1.1 %d X\r\n\r\n" % status))
    ) as container:
        assert run(read, container) == b""


def test_a_cancelled_receive_loses_nothing() -> None:
    async def impatient(container: Container) -> bytes:
        received = b""
        async with container.call("POST", "/") as answer:
            while not received.endswith(b"9"):
                try:
                    async with asyncio.timeout(0.005):
                        received += await answer.receive()
                except TimeoutError:
                    pass

        return received

    with scripted(chunked(*(b"%d" % i for i in range(10)), pause_s=0.01)) as container:
        assert run(impatient, container) == b"0123456789"


def test_what_came_before_a_cut_can_be_received_and_then_the_fault() -> None:
    async def receive(container: Container) -> list[bytes]:
        async with container.call("POST", "/") as answer:
            # The cut comes before the first receive
            await asyncio.sleep(0.1)
            received = [await answer.receive(), await answer.receive(), await answer.receive()]
            assert isinstance(answer.fault, ResponseCut)

            with pytest.raises(ResponseCut, match="did not complete its answer"):
                await answer.read()

        return received

    with scripted(chunked(b"one", end=b"9\r\ntw")) as container:
        assert run(receive, container) == [b"one", b"tw", b""]


def test_an_answer_shorter_than_its_length_is_cut() -> None:
    with scripted(
        lambda talk: talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel")
    ) as container:
        with pytest.raises(ResponseCut):
            run(read, container)


def test_a_body_longer_than_the_caller_takes_is_not_read_to_its_end() -> None:
    async def short(container: Container) -> None:
        async with container.call("POST", "/") as answer:
            with pytest.raises(ResponseCut, match="more than 3 bytes"):
                await answer.read(3)

    with scripted(whole(b"hello")) as container:
        run(short, container)


def test_time_counts_to_the_end_of_the_answer() -> None:
    with scripted(then_silent(chunked(b"one", end=b""))) as container:
        started_s = time.monotonic()
        with pytest.raises(OutOfTime, match=r"within 0.2 s"):
            asyncio.run(read(Container(container.url), timeout_s=0.2))

        assert time.monotonic() - started_s < 5
        assert container.left.wait(60)


def test_a_port_where_nobody_listens_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="no connection to"):
        asyncio.run(read(Container(f"http://127.0.0.1:{free_port()}")))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "https://a", "http://", "http://a?b", "http://a:x"]
)
def test_a_container_is_an_http_url(url: str) -> None:
    with pytest.raises(ValueError):
        Container(url)


def test_an_endpoint_is_out_of_service_some_time_after_its_container_is_gone() -> None:
    async def describe(container: ScriptedContainer) -> list[str]:
        watched = WatchedContainer(container.url)
        watched.out_of_service_s = 0.3
        statuses = [(await watched.state()).status]
        # The connection ends without an answer
        container.ping = lambda talk: None
        statuses.append((await watched.state()).status)
        await asyncio.sleep(0.4)
        statuses.append((await watched.state()).status)
        container.ping = whole(b"")
        return [*statuses, (await watched.state()).status]

    with scripted(whole(b"")) as container:
        assert asyncio.run(describe(container)) == [
            "InService",
            "InService",
            "OutOfService",
            "InService",
        ]
