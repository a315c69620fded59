"""When a WebSocket ends by itself, without a server around it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Scope, Send

from lmi.duplex.conversation import Duplex
from lmi.duplex.paths import STREAM
from lmi.duplex.socket import Socket
from lmi.http.exchange import WEBSOCKET, Exchange

IDLE_S = 0.05


async def answer_late(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a body after thrice the time in which an idle connection ends."""
    body = (await receive())["body"]
    await asyncio.sleep(3 * IDLE_S)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


class Client:
    """The other end of a WebSocket: what it sends, and all that it gets."""

    def __init__(self, *messages: object) -> None:
        self.got: list[dict[str, Any]] = []
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self._messages.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})

    async def send(self, message: Any) -> None:
        self.got.append(message)

    async def talk(self) -> None:
        """Talk to a server until it ends the connection."""
        socket = Socket(self._messages.get, self.send, can_refuse=False)
        scope: Scope = {"type": "http", "method": "GET", "path": STREAM, "headers": []}
        scope |= {"app": answer_late, WEBSOCKET: socket}
        await Duplex(Exchange(scope, self._messages.get, self.send), socket, IDLE_S).run()


def test_a_connection_on_which_nothing_runs_is_closed_and_none_on_which_something_does() -> None:
    client = Client({"id": "a", "body": {"inputs": "hi"}})
    asyncio.run(client.talk())
    *answer, close = client.got

    assert [json.loads(message["text"]) for message in answer] == [
        {"id": "a", "status": 200, "headers": {}},
        {"id": "a", "data": {"inputs": "hi"}},
        {"id": "a", "end": "complete"},
    ]
    reason = "nothing came for 0.05 s"
    assert close == {"type": "websocket.close", "code": 1001, "reason": reason}
