"""WebSockets of a whole server, on the loop and behind the processes that it has for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedOK
from websockets.sync.client import ClientConnection, connect

from tests.served import launch
from tests.system.container import write_model

STREAM = "/invocations-bidirectional-stream"


def last_messages(websocket: ClientConnection) -> tuple[list[Any], int]:
    """All that comes until the server closes, and the code with which it does."""
    messages = []
    with pytest.raises(ConnectionClosedOK) as raised:
        while True:
            messages.append(json.loads(websocket.recv(timeout=60)))

    assert raised.value.rcvd is not None
    return messages, raised.value.rcvd.code


def test_a_server_that_drains_sends_the_answer_that_runs_and_closes(tmp_path: Path) -> None:
    origin = "https://app.example"
    options = {"frontend_workers": 1, "cors_allowed_origins": origin}
    folder = write_model(tmp_path / "model", **options)
    with launch(folder) as server:
        server.wait_ready()
        url = f"ws://127.0.0.1:{server.port}{STREAM}"
        body = {"inputs": "ab", "parameters": {"max_new_tokens": 200}, "stream": True}
        with connect(url, origin=origin) as idle, connect(url) as busy:
            # One of many pieces.
            busy.send(bytes(2 << 20))
            assert "malformed" in json.loads(busy.recv(timeout=60))["error"]
            busy.send(json.dumps({"id": "a", "body": body}))
            assert json.loads(busy.recv(timeout=60))["status"] == 200
            assert server.metric("lmi_requests_in_flight") == 1

            server.drain()
            assert last_messages(idle) == ([], 1001)
            messages, code = last_messages(busy)
            assert code == 1001 and messages[-1] == {"id": "a", "end": "complete"}
            assert len(messages) == 201

        assert server.wait() == 0
        lines = [line for line in server.log_lines() if line.get("status") == 101]
        assert [line.get("num_messages") for line in lines] == [None, 2]
