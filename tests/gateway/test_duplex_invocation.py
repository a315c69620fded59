"""A stream in both directions that lasts for too long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from botocore.eventstream import EventStreamBuffer

from lmi.gateway.duplex_invocation import DuplexInvocation
from lmi.gateway.exchange import AwsExchange


class Silence:
    """The half of a client that sends nothing, and a WebSocket on which nothing comes."""

    async def receive(self) -> None:
        await asyncio.Event().wait()


def last_event(limit_s: float) -> dict[str, Any]:
    """What ends a stream in which neither side says anything."""
    sent = bytearray()

    async def send(message: dict[str, Any]) -> None:
        sent.extend(message["body"])

    async def converse() -> None:
        scope = {"type": "http", "http_version": "2", "headers": [], "path": "/"}
        exchange = AwsExchange(scope, None, send)  # type: ignore[arg-type]
        silence: Any = Silence()
        await DuplexInvocation(exchange, silence, silence, limit_s).run()

    asyncio.run(converse())
    buffer = EventStreamBuffer()
    buffer.add_data(bytes(sent))
    [event] = [event.to_response_dict() for event in buffer]
    return event


def test_a_stream_ends_at_its_limit_and_says_so() -> None:
    event = last_event(limit_s=0.01)
    assert event["headers"][":exception-type"] == "ModelStreamError"
    assert json.loads(event["body"]) == {
        "ErrorCode": "ModelInvocationTimeExceeded",
        "Message": "The stream has lasted for the 0.01 s that one may last. Open another.",
    }
