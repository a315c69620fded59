"""A client of streams in both directions: HTTP/2 by h2 on a socket, and the events of its half.

It reads only when a test asks it to, so it is a slow client too.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from botocore.eventstream import EventStreamBuffer
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)

from lmi.gateway.eventstream import encode_headers, frame

TIMEOUT_S = 60.0
PATH = "/endpoints/any/invocations-bidirectional-stream"
OPERATION = {":message-type": "event", ":event-type": "PayloadPart"}


def event(data: bytes, **headers: str) -> bytes:
    """A PayloadPart, or what the headers say."""
    return frame(encode_headers({**OPERATION, **headers}), data)


@dataclass
class Answer:
    """What has come of an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    num_unacknowledged: int = 0
    is_complete: bool = False
    # Why the server has ended it early, None if it has not.
    reset: int | None = None

    @property
    def events(self) -> list[dict[str, Any]]:
        buffer = EventStreamBuffer()
        buffer.add_data(bytes(self.body))
        return [event.to_response_dict() for event in buffer]

    @property
    def parts(self) -> list[tuple[str, str, bytes]]:
        """Type, state and bytes of each part."""
        return [
            (event["headers"]["DataType"], event["headers"]["CompletionState"], event["body"])
            for event in self.events
        ]


class Http2Client:
    """One connection."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.authority = parts.netloc
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")

        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.flush()
        self.answers: dict[int, Answer] = {}
        # Whether windows are opened again as data comes.
        self.opens_windows = True
        self.end_of_connection: ConnectionTerminated | None = None

    def __enter__(self) -> Http2Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def open(
        self,
        path: str = PATH,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        is_sent: bool = True,
    ) -> int:
        """Begin a request, and return its stream."""
        stream = self.h2.get_next_available_stream_id()
        fields = [
            (":method", method),
            (":path", path),
            (":authority", self.authority),
            (":scheme", "http"),
            *(headers or {}).items(),
        ]
        self.h2.send_headers(stream, fields)
        if is_sent:
            self.flush()

        self.answers[stream] = Answer()
        return stream

    def send(self, stream: int, data: bytes, is_last: bool = False) -> None:
        """Send bytes of a request, for which there is room."""
        self.h2.send_data(stream, data, end_stream=is_last)
        self.flush()

    def send_part(self, stream: int, data: bytes, **headers: str) -> None:
        self.send(stream, event(data, **headers))

    def read(self) -> None:
        """Take what comes next."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server has closed")

        for event in self.h2.receive_data(data):
            self._take(event)

        self.flush()

    def read_until_begun(self, stream: int) -> Answer:
        answer = self.answers[stream]
        while not answer.status:
            self.read()

        return answer

    def read_parts(self, stream: int, num: int) -> list[tuple[str, str, bytes]]:
        answer = self.answers[stream]
        while len(answer.events) < num:
            self.read()

        return answer.parts

    def read_to_end(self, stream: int) -> Answer:
        answer = self.answers[stream]
        while not answer.is_complete and answer.reset is None:
            self.read()

        return answer

    def open_windows(self) -> None:
        """Let the server send on."""
        self.opens_windows = True
        for stream, answer in self.answers.items():
            self._acknowledge(stream, answer)

        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def _take(self, event: Event) -> None:
        match event:
            case ResponseReceived():
                answer = self.answers[event.stream_id]
                answer.headers = {str(name): str(value) for name, value in event.headers}
                answer.status = int(answer.headers[":status"])
            case DataReceived():
                answer = self.answers[event.stream_id]
                answer.body += event.data
                answer.num_unacknowledged += event.flow_controlled_length
                if self.opens_windows:
                    self._acknowledge(event.stream_id, answer)
            case StreamEnded():
                self.answers[event.stream_id].is_complete = True
            case StreamReset():
                self.answers[event.stream_id].reset = event.error_code
            case ConnectionTerminated():
                self.end_of_connection = event

    def _acknowledge(self, stream: int, answer: Answer) -> None:
        num_bytes = answer.num_unacknowledged
        answer.num_unacknowledged = 0
        if num_bytes:
            self.h2.acknowledge_received_data(num_bytes, stream)


def speaks_http_1(url: str) -> bytes:
    """What a client of HTTP/1.1 gets."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    with closing(socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data

        return answer
