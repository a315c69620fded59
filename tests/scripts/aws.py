"""A small HTTP server in place of AWS: it notes every call and gives the answers that a test lists
for it.
"""

from __future__ import annotations

import binascii
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Reply:
    """One answer. `pieces` are sent as chunks of a stream, and `is_cut` breaks its connection
    before the end.
    """

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: tuple[bytes, ...] = ()
    is_cut: bool = False


@dataclass
class Aws:
    """`replies` holds the answers by operation, or by path; the last one is repeated."""

    replies: dict[str, list[Reply]]
    calls: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, name: str) -> Reply:
        waiting = self.replies.get(name) or [Reply({})]
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]


@contextmanager
def aws(replies: dict[str, list[Reply]]) -> Iterator[Aws]:
    served = Aws(replies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name = self.headers.get("X-Amz-Target", self.path).rpartition(".")[2]
            served.headers.append({key.lower(): value for key, value in self.headers.items()})
            served.calls.append(
                (name, json.loads(body) if "X-Amz-Target" in self.headers else body)
            )
            self._send(served.answer(name))

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for key, value in reply.headers.items():
                self.send_header(key, value)

            if reply.pieces:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in reply.pieces:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

                self.wfile.write(b"" if reply.is_cut else b"0\r\n\r\n")
                self.close_connection = reply.is_cut
                return

            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        served.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield served
        finally:
            server.shutdown()


def part(payload: bytes) -> bytes:
    """A PayloadPart as one frame of AWS's event stream."""
    headers = {
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        ":message-type": "event",
    }
    return frame(headers, payload)


def frame(headers: dict[str, str], payload: bytes) -> bytes:
    head = b"".join(
        struct.pack(">B", len(name))
        + name.encode()
        + struct.pack(">BH", 7, len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    message = prelude + struct.pack(">I", binascii.crc32(prelude)) + head + payload
    return message + struct.pack(">I", binascii.crc32(message))
