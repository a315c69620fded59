"""Responses as a server gets them: their headers, and streams that are sent whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lmi.http.buffered import BufferedExchange
from lmi.http.exchange import MAX_HEADER_BYTES, Exchange

Route = Callable[[Exchange], Awaitable[None]]


def answer(
    kind: type[Exchange], route: Route, headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Call the route with an exchange, and return the messages that it sends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    fields = [
        (name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()
    ]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": fields}
    asyncio.run(route(kind(scope, receive, send)))  # type: ignore[arg-type]
    return sent


def names(message: dict[str, Any]) -> list[str]:
    return [name.decode() for name, _ in message["headers"]]


def test_a_buffered_stream_is_one_message_with_its_length() -> None:
    async def route(exchange: Exchange) -> None:
        await exchange.start(200, "text/plain", [("x-mine", "1")])
        await exchange.write(b"ab")
        assert exchange.status == 200 and not exchange.has_begun

        await exchange.end(exchange.line_end())

    head, body = answer(BufferedExchange, route)
    assert (head["status"], dict(head["headers"])[b"content-length"], body["body"]) == (
        200,
        b"3",
        b"ab\n",
    )
    assert names(head)[:2] == ["content-type", "x-mine"] and "more_body" not in body


def test_a_buffered_stream_that_breaks_off_can_still_be_refused() -> None:
    async def route(exchange: Exchange) -> None:
        await exchange.start(200, "text/plain")
        await exchange.write(b"ab")
        await exchange.send_whole(500, "application/json", b"{}")
        assert exchange.has_begun

    head, body = answer(BufferedExchange, route)
    assert (head["status"], body["body"]) == (500, b"{}")


@pytest.mark.parametrize("num", [10, 20_000])
def test_headers_without_room_are_left_out_from_the_last_one(
    num: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def route(exchange: Exchange) -> None:
        await exchange.send_whole(
            200, "text/plain", b"a", [(f"x-{n}", "v" * 500) for n in range(num)]
        )

    head, _ = answer(Exchange, route, {"x-request-id": "r" * 128})
    assert names(head) == [
        "content-type",
        *[f"x-{n}" for n in range(7)],
        "x-request-id",
        "content-length",
    ]
    assert sum(len(name) + len(value) + 4 for name, value in head["headers"]) < MAX_HEADER_BYTES

    [warning] = [record.getMessage() for record in caplog.records]
    assert "without room for: 'x-7', 'x-8'" in warning and len(warning) < 300


def test_a_content_type_without_room_goes_last_and_the_length_stays() -> None:
    async def route(exchange: Exchange) -> None:
        await exchange.send_whole(200, "text/" + "x" * 5000, b"a", [("x-mine", "1")])

    assert names(answer(Exchange, route)[0]) == ["x-request-id", "content-length"]


def test_json_is_sent_whole_with_its_type_and_length() -> None:
    async def route(exchange: Exchange) -> None:
        await exchange.send_json({"a": [1, "\u00fc"]}, 503)

    head, body = answer(Exchange, route)
    assert (head["status"], body["body"]) == (503, '{"a":[1,"\u00fc"]}'.encode())
    assert dict(head["headers"])[b"content-type"] == b"application/json"
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body["body"])
