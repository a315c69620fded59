"""The guarded protocol on a real port, fed with raw bytes: the misbehaviour of clients that it must
stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from lmi.http.arrival import LARGE_CHUNK_BYTES, MAX_CHUNKS, MAX_FIELDS
from lmi.http.protocol import MAX_PIPELINED, GuardedProtocol
from lmi.http.request_head import MAX_HEAD_BYTES
from tests.machine import measurements
from tests.scripted import wait_until

TIMEOUT_S = 60.0
FLOOD = b"~" * 16384
NUM_FLOODS = 100
SEND_BUFFER_BYTES = 65536
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class PatientProtocol(GuardedProtocol):
    """Its timeouts are longer than any pause of a busy machine."""

    header_timeout_s = body_timeout_s = stall_timeout_s = TIMEOUT_S


class HastyProtocol(GuardedProtocol):
    """For tests of timeouts."""

    header_timeout_s = 1.5
    body_timeout_s = 2.0
    stall_timeout_s = 2.0


class StrictProtocol(PatientProtocol):
    slow_start_s = 0.5
    max_connections = 2


class LeavingProtocol(PatientProtocol):
    leaves = threading.Event()

    def is_leaving(self) -> bool:
        return self.leaves.is_set()


class App:
    """Answers with the path and the size of the body. `/slow` waits before its answer until the
    test lets it go on.

    `/endless` never answers. `/stream` waits in the middle of its answer. `/flood` first sends more
    than a client and the kernel hold between them, `/brim` what the kernel takes and a little more.
    `/unread` is answered 413 before its body is asked for.
    """

    connections: set[Any]  # of the server

    def __init__(self) -> None:
        self.heard: list[str] = []
        # Names, of the last request when its body was whole
        self.fields: list[bytes] = []
        self.disconnected = threading.Event()
        self.go_on = threading.Event()
        self.flooded = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.heard.append(scope["path"])
        if scope["path"] == "/unread":
            await send(
                {
                    "type": "http.response.start",
                    "status": 413,
                    "headers": [(b"content-length", b"8")],
                }
            )
            await send({"type": "http.response.body", "body": b"too long"})
            return

        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return

            num_bytes += len(message["body"])
            if not message["more_body"]:
                break

        self.fields = [name for name, _ in scope["headers"]]
        if scope["path"] == "/slow":
            await self._wait()

        if scope["path"] == "/endless":
            await asyncio.Event().wait()

        head = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first,", "more_body": True})
            await self._wait()

        if scope["path"] == "/brim":
            [transport] = [
                connection.transport for connection in self.connections if connection.scope is scope
            ]
            while not transport.get_write_buffer_size():
                await send({"type": "http.response.body", "body": FLOOD, "more_body": True})
                # Until then the kernel has had no chance to take it
                await asyncio.sleep(0)

            self.flooded.set()

        if scope["path"] == "/flood":
            for _ in range(NUM_FLOODS):
                await send({"type": "http.response.body", "body": FLOOD, "more_body": True})

            self.flooded.set()

        await send({"type": "http.response.body", "body": f"{scope['path']} {num_bytes}".encode()})

    async def _wait(self) -> None:
        await asyncio.to_thread(self.go_on.wait, TIMEOUT_S)


@dataclass
class Served:
    port: int
    app: App

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)

    def connect_with_a_small_buffer(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(TIMEOUT_S)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def talk(self, *parts: bytes, end: bytes | None = None) -> bytes:
        """Send bytes and nothing after them; return what comes until its `end`, or until the server
        closes.
        """
        with self.connect() as connection:
            for part in parts:
                try:
                    connection.sendall(part)
                except OSError:
                    # The server has closed
                    break

            return hear(connection, end)


def hear(connection: socket.socket, end: bytes | None = None) -> bytes:
    """What comes until its `end`, or until the server closes."""
    connection.settimeout(TIMEOUT_S)
    heard = b""
    try:
        while (end is None or end not in heard) and (data := connection.recv(65536)):
            heard += data
    except ConnectionError:
        pass

    return heard


@contextmanager
def serving(protocol: type[GuardedProtocol], finish_s: int | None = None) -> Iterator[Served]:
    app = App()
    config = uvicorn.Config(
        app,
        http=protocol,
        loop="uvloop",
        ws="none",
        lifespan="off",
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=finish_s,
    )
    uvicorn_server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    app.connections = uvicorn_server.server_state.connections
    yield Served(listener.getsockname()[1], app)
    uvicorn_server.should_exit = True
    app.go_on.set()
    thread.join(TIMEOUT_S)

    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(PatientProtocol) as served:
        yield served


@pytest.fixture
def hasty() -> Iterator[Served]:
    with serving(HastyProtocol) as served:
        yield served


@pytest.fixture
def strict() -> Iterator[Served]:
    with serving(StrictProtocol) as served:
        yield served


@pytest.fixture
def served(server: Served) -> Served:
    server.app.heard.clear()
    server.app.disconnected.clear()
    server.app.go_on.clear()
    return server


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def assert_refused(answer: bytes, status: int) -> None:
    """One JSON object and a closed connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert statuses(answer) == [status], answer[:300]
    assert (
        b"content-type: application/json" in head
        and b"connection: close" in head
        and b"server:" not in head
    )
    assert head.count(b"x-content-type-options: nosniff") == 1
    assert body.endswith(b"}\n")
    parsed = json.loads(body)
    assert parsed.keys() == {"error", "code"} and parsed["code"] == status and parsed["error"]


def post(*fields: str, body: bytes = b"", version: str = "1.1", path: str = "/") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: a", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHUNKED = "Transfer-Encoding: chunked"
LINE = "a request line that is b'GET  / HTTP/1.1'"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
CORPUS: dict[str, tuple[bytes, int]] = {
    "length and chunks": (
        post("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + HIDDEN),
        400,
    ),
    "two equal lengths": (post("Content-Length: 3", "Content-Length: 3", body=b"abc"), 400),
    "two unequal lengths": (post("Content-Length: 3", "Content-Length: 9", body=b"abc"), 400),
    "a list of lengths": (post("Content-Length: 3, 3", body=b"abc"), 400),
    "a signed length": (post("Content-Length: +3", body=b"abc"), 400),
    "a negative length": (post("Content-Length: -3", body=b"abc"), 400),
    "chunks in HTTP/1.0": (
        post("Transfer-Encoding: chunked", body=b"0\r\n\r\n", version="1.0"),
        400,
    ),
    "an unknown transfer coding": (post("Transfer-Encoding: gzip", body=b"abc"), 400),
    "chunked is not last": (post("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"), 400),
    "a coding before chunked": (
        post("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + HIDDEN),
        501,
    ),
    "a coding in a field before chunked": (
        post("Transfer-Encoding: gzip", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + HIDDEN),
        501,
    ),
    "a comma after chunked": (post("Transfer-Encoding: chunked,", body=b"0\r\n\r\n" + HIDDEN), 400),
    "OPTIONS of the server as a whole": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "GET of the server as a whole": (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "an authority as target": (b"GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a target of another scheme": (b"GET ftp://a/b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a space before the colon": (post("Content-Length : 3", body=b"abc"), 400),
    "lines ended by LF only": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "a folded line": (post("X: a\r\n b"), 400),
    "a bare CR in a value": (post("X: a\rb"), 400),
    "a NUL in a value": (post("X: a\0b"), 400),
    "LF in a chunk extension": (
        post("Transfer-Encoding: chunked", body=b"3;a\nb\r\nabc\r\n0\r\n\r\n"),
        400,
    ),
    "chunks framed by LF": (post("Transfer-Encoding: chunked", body=b"3\nabc\n0\n\n"), 400),
    "a chunk longer than it says": (
        post("Transfer-Encoding: chunked", body=b"3\r\nabcdef\r\n0\r\n\r\n"),
        400,
    ),
    "a length of 23 digits": (post("Content-Length: 99999999999999999999999"), 400),
    "a chunk over 64 bit": (post("Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n"), 400),
    "a TLS hello": (bytes.fromhex("16030100c8010000c40303") + bytes(190), 400),
    **{
        f"a chunk size that is {size!r}": (
            post(CHUNKED, body=size + b"\r\nabc\r\n0\r\n\r\n" + HIDDEN),
            400,
        )
        for size in (
            b"",
            b"0x3",
            b"1_0",
            b" 3",
            b"3 ",
            b"3\t",
            b"+3",
            b"-3",
            b"3,3",
            b"3;",
            b"3 ;a",
            b"3;a\rb",
            b"3;a\0b",
        )
    },
    "a line end in quotes": (post(CHUNKED, body=b'3;a="\r\n"\r\nabc\r\n0\r\n\r\n' + HIDDEN), 400),
    "a chunk size ended by CR": (post(CHUNKED, body=b"3\rabc\r\n0\r\n\r\n" + HIDDEN), 400),
    "a chunk without an end": (post(CHUNKED, body=b"3\r\nabc0\r\n\r\n" + HIDDEN), 400),
    "a chunk ended by LF": (post(CHUNKED, body=b"3\r\nabc\n0\r\n\r\n" + HIDDEN), 400),
    "a trailer ended by LF": (post(CHUNKED, body=b"0\r\nX: a\n\r\n" + HIDDEN), 400),
    "a trailer with a space before it": (post(CHUNKED, body=b"0\r\n X: a\r\n\r\n" + HIDDEN), 400),
    "a length in a trailer": (post(CHUNKED, body=b"0\r\nContent-Length: 3\r\n\r\n" + HIDDEN), 400),
    "a coding in a trailer": (
        post(CHUNKED, body=b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN),
        400,
    ),
    "very many trailers": (post(CHUNKED, body=b"0\r\n" + b"X: a\r\n" * 100_000 + b"\r\n"), 431),
    **{
        f"a length that is {length!r}": (post(f"Content-Length: {length}", body=b"0123456789"), 400)
        for length in ("", "0x3", "1_0", "1 0", "3abc", "3.0", "-0", "3,", "\x0b3", "9" * 23)
    },
    **{
        f"a transfer coding that is {coding!r}": (
            post(f"Transfer-Encoding: {coding}", body=b"0\r\n\r\n" + HIDDEN),
            status,
        )
        for coding, status in {
            **dict.fromkeys(
                (
                    "",
                    "\x0bchunked",
                    '"chunked"',
                    "identity",
                    "chunked;q=1",
                    "chunked, chunked",
                    "chunked\0",
                ),
                400,
            ),
            **dict.fromkeys(("xchunked", ",chunked"), 501),
        }.items()
    },
    "a coding on a folded line": (
        post("Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n" + HIDDEN),
        400,
    ),
    "a space before the colon of a coding": (
        post("Transfer-Encoding : chunked", body=b"0\r\n\r\n" + HIDDEN),
        400,
    ),
    "chunked twice": (post(CHUNKED, CHUNKED, body=b"0\r\n\r\n" + HIDDEN), 400),
    "an empty coding beside a length": (
        post("Transfer-Encoding:", "Content-Length: 3", body=b"abc"),
        400,
    ),
    **{
        f"a field that is {field!r}": (post(field), 400)
        for field in ("X", "X a", ": a", "X Y: a", "X\tY: a", "X\1Y: a", "Xé: a")
    },
    **{
        f"a value that is {value!r}": (post(f"X: {value}"), 400)
        for value in ("a\1b", "a\x7fb", "a\r")
    },
    "a space before the first field": (b"GET / HTTP/1.1\r\n X: a\r\nHost: a\r\n\r\n", 400),
    **{
        f"a request line that is {line!r}": (line + b"\r\nHost: a\r\n\r\n", 400)
        for line in (
            *(
                b" GET / HTTP/1.1",
                b"GET\t/\tHTTP/1.1",
                b"GET HTTP/1.1",
                b"get / HTTP/1.1",
                b"FROB / HTTP/1.1",
            ),
            *(
                b"GET / http/1.1",
                b"GET / HTTP/1.1 ",
                b"GET / HTTP/01.1",
                b"GET / HTTP/1",
                b"GET / HTTP/1.10",
            ),
            *(
                b"GET / HTTPS/1.1",
                b"GET / ICE/1.0",
                b"GET a HTTP/1.1",
                b"GET /a#b HTTP/1.1",
                b"GET /a\0b HTTP/1.1",
            ),
            *(b"GET /a\1b HTTP/1.1", b"GET /\xc3\xa9 HTTP/1.1", b"GET http://u@a/ HTTP/1.1"),
            *(b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2", b"GET  / HTTP/1.1", b"GET /  HTTP/1.1"),
        )
    },
    "a chunk extension of 64 KB": (
        post(CHUNKED, body=b"3;a=%b\r\nabc\r\n0\r\n\r\n" % (b"a" * 65_536)),
        400,
    ),
    "a chunk extension of 1 MB": (
        post(CHUNKED, body=b"3;a=%b\r\nabc\r\n0\r\n\r\n" % (b"a" * 1_000_000)),
        400,
    ),
    "very many extensions": (
        post(CHUNKED, body=b"1;abcdefghijklmnopqrstuvwxyz=0123456789\r\na\r\n" * 30_000),
        400,
    ),
    "blanks before a value": (post("X:" + " " * 50_000 + "a"), 400),
    **{
        f"a host that is {host!r}": (f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), 400)
        for host in ("a b", "a/b", "u@a", "a, b", "a:b", "[a", "a\r\n b")
    },
    "the same Host twice": (post("Host: a"), 400),
    "a head ended by LF": (b"GET / HTTP/1.1\r\nHost: a\r\n\n", 400),
    "lines ended by CR": (b"GET / HTTP/1.1\rHost: a\r\r", 400),
    "spaces before the request": (b"  \r\n" + GET, 400),
    "the first bytes of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400),
    "no words at all": (b"\0" * 64, 400),
    "no Host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "two Hosts in HTTP/1.0": (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/3.0": (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", 505),
    "the HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "an unknown expectation": (post("Expect: a-miracle", "Content-Length: 3", body=b"abc"), 417),
    "a URL of 100 KB": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    "a field of 1 MB": (post("X: " + "a" * 1_000_000), 431),
    "a field name of 1 MB": (post("x" * 1_000_000 + ": a"), 431),
    "a head of 70 KB in fields": (post(*(f"X-{i}: {'a' * 1000}" for i in range(70))), 431),
    "200 fields": (post(*(f"X-{i}: a" for i in range(200))), 431),
    "more trailers than fields may be": (
        post(CHUNKED, body=b"0\r\n" + b"X: a\r\n" * (MAX_FIELDS + 1) + b"\r\n"),
        431,
    ),
    "100 000 fields": (post(*(f"X-{i}: a" for i in range(100_000))), 431),
}


@pytest.mark.parametrize("name", CORPUS)
def test_bad_bytes_are_refused_and_nothing_hidden_in_them_runs(served: Served, name: str) -> None:
    data, status = CORPUS[name]
    assert_refused(served.talk(data), status)
    assert "/hidden" not in served.app.heard


@pytest.mark.parametrize(
    "name", ["length and chunks", "a URL of 100 KB", "200 fields", "chunks framed by LF", LINE]
)
def test_bad_bytes_that_come_one_by_one_are_refused_too(served: Served, name: str) -> None:
    data, status = CORPUS[name]
    pieces = [data[at : at + 1] for at in range(200)] + [data[200:]]
    assert_refused(served.talk(*pieces), status)


GOOD: dict[str, tuple[bytes, bytes]] = {
    "a bare GET": (GET, b"/ 0"),
    "HTTP/1.0 without Host": (b"GET / HTTP/1.0\r\n\r\n", b"/ 0"),
    "a body by length": (post("Content-Length: 3", body=b"abc"), b"/ 3"),
    "a body in chunks": (
        post("Transfer-Encoding: chunked", body=b"3;x=y\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"),
        b"/ 4",
    ),
    "a head just under the limit": (post(*(f"X-{i}: {'a' * 1000}" for i in range(62))), b"/ 0"),
    "as many fields as may be": (post(*(f"X-{i}: a" for i in range(MAX_FIELDS - 1))), b"/ 0"),
    "as many chunks as may be": (
        post("Transfer-Encoding: chunked", body=b"1\r\na\r\n" * 60_000 + b"0\r\n\r\n"),
        b"60000",
    ),
    "as many trailers as may be": (
        post(CHUNKED, body=b"0\r\n" + b"X: a\r\n" * MAX_FIELDS + b"\r\n"),
        b"/ 0",
    ),
    "text that looks like the line of a large chunk": (
        post(CHUNKED, body=b"14\r\n\nfffffff\r\nfffffff\r\n\n\r\n7\r\nfffffff\r\n0\r\n\r\n"),
        b"/ 27",
    ),
    "a large chunk": (
        post(CHUNKED, body=b"%07x;a=b\r\n%b\r\n0\r\n\r\n" % (1 << 20, bytes(1 << 20))),
        b"/ 1048576",
    ),
    "an empty line before the request": (b"\r\n" + GET, b"/ 0"),
    "an expectation that can be met": (
        post("Expect: 100-continue", "Content-Length: 3", body=b"abc"),
        b"/ 3",
    ),
    "chunks with short extensions": (
        post(CHUNKED, body=b'1;x="y z"\r\na\r\n' * 10_000 + b"0;end\r\n\r\n"),
        b"/ 10000",
    ),
    "a URL as target": (b"GET http://a:80/b%20c?d=e HTTP/1.1\r\nHost: a\r\n\r\n", b"/b c 0"),
    "a URL without a path as target": (b"GET HTTP://a HTTP/1.1\r\nHost: a\r\n\r\n", b"/ 0"),
    **{
        f"a host that is {host!r}": (f"GET / HTTP/1.1\r\nHost:{host}\r\n\r\n".encode(), b"/ 0")
        for host in ("", "a.b-c_d:80", "a:", "[::1]:80", "[::1]", "127.0.0.1", "%41")
    },
    "a length with zeros before it": (post("Content-Length: 003", body=b"abc"), b"/ 3"),
    "a chunk size with zeros before it": (post(CHUNKED, body=b"0003\r\nabc\r\n00\r\n\r\n"), b"/ 3"),
    "a field that looks like another": (
        post("Transfer_Encoding: chunked", "Content-Length: 3", body=b"abc"),
        b"/ 3",
    ),
    "a value that is no ASCII": (post("X: é"), b"/ 0"),
    "Chunked with a capital": (
        post("Transfer-Encoding: Chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
        b"/ 3",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_bytes_are_served(served: Served, name: str) -> None:
    data, answer = GOOD[name]
    heard = served.talk(data, end=answer)
    assert b"HTTP/1.1 200 OK" in heard and answer in heard
    assert b"x-content-type-options: nosniff\r\n" in heard


def test_a_connection_carries_thousands_of_requests(served: Served) -> None:
    """What is counted of each, as the bytes of which the parser tells nothing, does not add up."""
    requests = (
        GET,
        post("Content-Length: 3", body=b"abc"),
        post(CHUNKED, body=b"1;x=y\r\na\r\n0\r\n\r\n"),
    )
    with served.connect() as connection:
        for number in range(3000):
            connection.sendall(requests[number % 3])
            assert statuses(hear(connection, end=(b"/ 0", b"/ 3", b"/ 1")[number % 3])) == [200], (
                number
            )


def test_a_trailer_is_no_field_of_the_head(served: Served) -> None:
    body = b"3\r\nabc\r\n0\r\nHost: b\r\nX-Api-Key: stolen\r\n\r\n"
    heard = served.talk(post(CHUNKED, body=body), GET, end=b"/ 0")
    assert statuses(heard) == [200, 200]
    served.talk(post(CHUNKED, body=body), end=b"/ 3")
    assert served.app.fields == [b"host", b"transfer-encoding"]


def test_a_client_of_http_1_0_is_not_told_to_continue(served: Served) -> None:
    heard = served.talk(
        post("Expect: 100-continue", "Content-Length: 3", body=b"abc", version="1.0")
    )
    assert statuses(heard) == [200] and heard.endswith(b"/ 3")


def test_too_many_chunks_are_refused(served: Served) -> None:
    body = b"1\r\na\r\n" * (MAX_CHUNKS + 1) + b"0\r\n\r\n"
    assert_refused(served.talk(post("Transfer-Encoding: chunked", body=body)), 400)


def test_large_chunks_may_be_as_many_as_a_large_body_needs(served: Served) -> None:
    chunk = b"%x\r\n%b\r\n" % (LARGE_CHUNK_BYTES, bytes(LARGE_CHUNK_BYTES))
    body = chunk * (MAX_CHUNKS + 10) + b"0\r\n\r\n"
    answer = b"/ %d" % ((MAX_CHUNKS + 10) * LARGE_CHUNK_BYTES)
    heard = served.talk(post("Transfer-Encoding: chunked", body=body), end=answer)
    assert statuses(heard) == [200] and answer in heard


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_an_upgrade_is_not_taken_and_the_request_is_served_with_its_body(
    served: Served, offer: str
) -> None:
    request = post(
        "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}", "Content-Length: 3", body=b"abc"
    )
    heard = served.talk(
        request + post("Content-Length: 4", body=b"abcd", path="/next"), end=b"/next 4"
    )
    assert statuses(heard) == [200, 200] and b"/ 3" in heard and b"/next 4" in heard


def test_a_request_that_offers_an_upgrade_is_held_to_the_same_rules(served: Served) -> None:
    offer = ("Connection: Upgrade", "Upgrade: h2c")
    assert_refused(served.talk(post(*offer, "Host: b")), 400)
    assert_refused(
        served.talk(
            post(*offer, "Content-Length: 3", "Transfer-Encoding: chunked", body=b"0\r\n\r\n")
        ),
        400,
    )


# Answers.


@pytest.mark.parametrize(
    "connection", [(), ("Connection: keep-alive",)], ids=["plain", "keep-alive"]
)
def test_a_stream_to_an_http_1_0_client_ends_with_the_connection(
    served: Served, connection: tuple[str, ...]
) -> None:
    served.app.go_on.set()
    head, _, body = served.talk(post(*connection, path="/stream", version="1.0")).partition(
        b"\r\n\r\n"
    )
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body == b"first,/stream 0"


ANNOUNCED = {
    "a long body": ("Content-Length: 100000",),
    "a body in chunks": ("Transfer-Encoding: chunked",),
}
EXPECTED = {"a short body that is held back": ("Expect: 100-continue", "Content-Length: 3")}


@pytest.mark.parametrize("name", [*ANNOUNCED, *EXPECTED])
def test_an_answer_before_the_body_closes_the_connection_without_waiting_for_the_rest(
    served: Served, name: str
) -> None:
    with served.connect() as connection:
        connection.sendall(post(*(ANNOUNCED | EXPECTED)[name], path="/unread"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    head, _, body = answer.partition(b"\r\n\r\n")
    assert statuses(answer) == [413] and body == b"too long", (
        "a 100 was sent, or the answer was not whole"
    )
    assert head.count(b"connection: close") == 1


def test_a_client_that_first_sends_a_body_nobody_reads_still_has_its_answer(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(
            post(f"Content-Length: {100 * len(FLOOD)}", "Connection: close", path="/unread")
        )
        assert select.select([connection], [], [], TIMEOUT_S)[0], "there is no answer"
        for _ in range(100):
            connection.sendall(FLOOD)

        connection.shutdown(socket.SHUT_WR)
        assert hear(connection).endswith(b"too long")


def test_a_short_rest_of_a_body_is_forgotten_and_the_connection_kept(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(post("Content-Length: 3", path="/unread"))
        assert b"connection: close" not in until(connection, b"too long")
        connection.sendall(b"abc" + GET)
        assert statuses(until(connection, b"/ 0")) == [200]


# Timeouts.


def test_a_connection_that_says_nothing_is_closed(hasty: Served) -> None:
    assert_refused(hasty.talk(), 408)


def test_a_head_that_drips_is_refused_at_its_deadline(hasty: Served) -> None:
    for measurement in measurements():
        started_s = time.monotonic()
        with hasty.connect() as connection, measurement.within(5):
            answer = drip(connection, GET[:-2] + b"X: " + b"a" * 100, pause_s=0.05)

        assert_refused(answer, 408)
        assert time.monotonic() - started_s > 0.7 * HastyProtocol.header_timeout_s


def test_the_second_head_of_a_connection_has_a_deadline_too(hasty: Served) -> None:
    with hasty.connect() as connection:
        connection.sendall(GET)
        assert statuses(until(connection, b"/ 0")) == [200]
        connection.sendall(GET[:10])
        assert_refused(hear(connection), 408)


def test_an_idle_connection_between_requests_is_kept(hasty: Served) -> None:
    with hasty.connect() as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert statuses(until(connection, b"/ 0")) == [200]
            time.sleep(HastyProtocol.header_timeout_s + 0.2)


def test_a_body_that_drips_is_refused_and_its_application_hears_a_disconnect(hasty: Served) -> None:
    with hasty.connect() as connection:
        connection.sendall(post("Content-Length: 100000"))
        assert_refused(drip(connection, b"a" * 1000, pause_s=0.02), 408)

    assert hasty.app.disconnected.wait(TIMEOUT_S)


def test_a_body_slower_than_a_kilobyte_a_second_is_refused(strict: Served) -> None:
    for measurement in measurements():
        with strict.connect() as connection, measurement.within(10):
            connection.sendall(post("Content-Length: 100000"))
            assert_refused(drip(connection, b"a" * 1000, pause_s=0.02), 408)


def test_a_request_that_takes_long_to_answer_is_no_slow_body(hasty: Served) -> None:
    with hasty.connect() as connection:
        connection.sendall(post("Content-Length: 3", body=b"abc", path="/slow"))
        time.sleep(HastyProtocol.body_timeout_s + 0.5)
        hasty.app.go_on.set()
        assert statuses(until(connection, b"/slow 3")) == [200]


# Several requests on one connection.


@pytest.mark.parametrize("num_requests", [2, 5, MAX_PIPELINED])
def test_pipelined_requests_are_answered_in_order(served: Served, num_requests: int) -> None:
    paths = [f"/{i:03d}" for i in range(num_requests)]
    heard = served.talk(
        b"".join(post("Content-Length: 1", body=b"x", path=path) for path in paths),
        end=f"{paths[-1]} 1".encode(),
    )
    assert statuses(heard) == [200] * num_requests
    assert served.app.heard == paths


def test_a_queue_of_pipelined_requests_is_bounded_and_ends_with_a_refusal(served: Served) -> None:
    served.app.go_on.set()
    heard = served.talk(post(path="/slow") + GET * 5000)

    assert statuses(heard)[-1] == 400 and set(statuses(heard)[:-1]) == {200}
    assert len(served.app.heard) == len(statuses(heard)) - 1 <= MAX_PIPELINED + 1


def test_a_refusal_waits_for_the_answers_before_it(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(post(path="/stream") + post(path="/queued") + b"rubbish\r\n\r\n")
        heard = until(connection, b"first,")
        assert statuses(heard) == [200]
        served.app.go_on.set()
        heard += hear(connection)

    assert statuses(heard) == [200, 200, 400] and b"/stream 0" in heard and b"/queued 0" in heard


def test_bad_bytes_in_a_queued_body_do_not_harm_the_answer_before_it(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(
            post(path="/stream") + post("Transfer-Encoding: chunked", body=b"zz\r\n", path="/bad")
        )
        heard = until(connection, b"first,")
        served.app.go_on.set()
        heard += hear(connection)

    assert statuses(heard) == [200, 400] and "/bad" not in served.app.heard


def test_when_a_server_leaves_each_answer_that_begins_ends_its_connection() -> None:
    with serving(LeavingProtocol) as served, served.connect() as connection:
        connection.sendall(GET)
        assert b"connection: close" not in until(connection, b"/ 0")
        connection.sendall(post(path="/slow"))
        wait_until(lambda: "/slow" in served.app.heard)
        LeavingProtocol.leaves.set()
        served.app.go_on.set()
        assert b"connection: close" in hear(connection), "and the server closes"


def test_the_connection_that_was_silent_for_longest_makes_room_for_a_new_one(
    strict: Served,
) -> None:
    silent = strict.connect()
    silent.sendall(GET)
    assert statuses(until(silent, b"/ 0")) == [200]

    recent = strict.connect()
    recent.sendall(GET)
    assert statuses(until(recent, b"/ 0")) == [200]

    with silent, recent, strict.connect() as newcomer:
        newcomer.sendall(GET)
        assert statuses(until(newcomer, b"/ 0")) == [200]

        [closed] = select.select([silent, recent], [], [], TIMEOUT_S)[0]
        assert closed is silent and closed.recv(1) == b""


def test_a_connection_with_a_part_of_a_head_makes_room_too(strict: Served) -> None:
    idle = [strict.connect() for _ in range(2)]
    for connection in idle:
        connection.sendall(GET[:10])

    with idle[0], idle[1], strict.connect() as newcomer:
        newcomer.sendall(GET)
        assert statuses(until(newcomer, b"/ 0")) == [200]

        [closed] = select.select(idle, [], [], TIMEOUT_S)[0]
        assert closed.recv(1) == b""


def test_idle_connections_make_room_for_files_that_were_opened_after_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of 64 models, which a client with 1,000 idle connections would keep from every other
    one.
    """
    with ExitStack() as opened:
        idle = [opened.enter_context(served.connect()) for _ in range(10)]
        assert statuses(served.talk(GET, end=b"/ 0")) == [200]

        files = [opened.enter_context(open(os.devnull)) for _ in range(40)]
        monkeypatch.setattr(
            GuardedProtocol, "last_client_fd", max(file.fileno() for file in files) - 1
        )
        for _ in range(4):
            assert statuses(served.talk(GET, end=b"/ 0")) == [200]

        closed = select.select(idle, [], [], TIMEOUT_S)[0]
        assert closed and all(connection.recv(1) == b"" for connection in closed)


def test_a_connection_that_fills_a_gap_among_open_files_takes_no_last_place(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a burst of which some have left. Where no place is left, libuv drops who comes."""
    with ExitStack() as opened:
        idle = [opened.enter_context(served.connect()) for _ in range(10)]
        for connection in idle:
            connection.sendall(GET)
            assert statuses(until(connection, b"/ 0")) == [200]

        files = [opened.enter_context(open(os.devnull)) for _ in range(40)]
        last_fd = max(file.fileno() for file in files)
        monkeypatch.setattr(GuardedProtocol, "last_client_fd", last_fd)
        # For the client's end of a connection, and for the server's
        for file in files[:2]:
            file.close()

        assert statuses(served.talk(GET, end=b"/ 0")) == [200]

        # Before they are closed as idle ones
        closed = select.select(idle, [], [], 2.0)[0]
        assert closed and all(connection.recv(1) == b"" for connection in closed)


def test_connections_that_had_their_last_answer_make_room_where_none_is_idle(
    strict: Served,
) -> None:
    refused = [strict.connect() for _ in range(2)]
    for connection in refused:
        connection.sendall(b"rubbish\r\n\r\n")
        assert statuses(until(connection, b"}")) == [400]

    assert statuses(strict.talk(GET, end=b"/ 0")) == [200]
    for connection in refused:
        connection.close()


def test_busy_connections_stay_and_newcomers_are_refused(strict: Served) -> None:
    busy = [strict.connect() for _ in range(2)]
    for connection in busy:
        connection.sendall(post(path="/stream"))
        until(connection, b"first,")

    refused = strict.talk(GET)
    assert_refused(refused, 503)
    assert b"retry-after: 1" in refused and b"x-lmi-refusal: overloaded" in refused

    strict.app.go_on.set()
    for connection in busy:
        with connection:
            assert b"/stream 0" in until(connection, b"/stream 0")


def test_a_connection_whose_client_has_not_read_its_answer_yet_is_busy(strict: Served) -> None:
    readers = [strict.connect_with_a_small_buffer() for _ in range(2)]
    for reader in readers:
        reader.sendall(b"GET /brim HTTP/1.1\r\nHost: a\r\n\r\n")
        assert strict.app.flooded.wait(TIMEOUT_S)
        strict.app.flooded.clear()

    assert_refused(strict.talk(GET), 503)
    for reader in readers:
        with reader:
            assert b"/brim 0\r\n0\r\n\r\n" in until(reader, b"/brim 0\r\n0\r\n\r\n")


def test_an_endless_head_costs_no_memory(served: Served) -> None:
    before = resident_bytes()
    with served.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        deadline = time.monotonic() + TIMEOUT_S
        with pytest.raises(OSError):  # cut
            while time.monotonic() < deadline:
                connection.sendall(b"a" * 65536)

    assert resident_bytes() - before < 8 << 20


def test_a_crowd_of_slow_heads_is_gone_after_the_deadline(hasty: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 1024)), hard))
    crowd = [hasty.connect() for _ in range(300)]
    for connection in crowd:
        connection.sendall(b"GET / HTTP/1.1\r\n")

    for connection in crowd:
        with connection:
            assert_refused(hear(connection), 408)

    assert statuses(hasty.talk(GET, end=b"/ 0")) == [200]


@pytest.fixture
def flooded(hasty: Served) -> Iterator[socket.socket]:
    """A client with a small buffer that asked for a large answer."""
    with hasty.connect_with_a_small_buffer() as connection:
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        yield connection


def test_a_client_that_stops_reading_is_cut_off(hasty: Served, flooded: socket.socket) -> None:
    assert hasty.app.flooded.wait(TIMEOUT_S), "the application waits for the client for ever"
    assert len(hear(flooded)) < len(FLOOD) * NUM_FLOODS
    assert statuses(hasty.talk(GET, end=b"/ 0")) == [200]


def test_a_client_that_does_not_read_the_end_of_an_answer_is_cut_off_too(hasty: Served) -> None:
    with hasty.connect_with_a_small_buffer() as connection:
        connection.sendall(b"GET /brim HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert hasty.app.flooded.wait(TIMEOUT_S) and hasty.app.connections
        wait_until(lambda: not hasty.app.connections)


def test_a_client_that_reads_slowly_is_not_cut_off(flooded: socket.socket) -> None:
    """It takes twice the stall timeout to read what the server has buffered."""
    heard = b""
    started = time.monotonic()
    while time.monotonic() < started + 2.5 * HastyProtocol.stall_timeout_s:
        # 50 KB a second
        heard += flooded.recv(2500)
        time.sleep(0.05)

    while data := flooded.recv(65536):
        heard += data

    assert heard.endswith(b"/flood 0\r\n0\r\n\r\n") and heard.count(b"~") == len(FLOOD) * NUM_FLOODS


def drip(connection: socket.socket, data: bytes, pause_s: float) -> bytes:
    """Send byte by byte until the server answers."""
    connection.settimeout(pause_s)
    for at in range(len(data)):
        connection.sendall(data[at : at + 1])
        try:
            if heard := connection.recv(65536):
                return heard + hear(connection)
        except TimeoutError:
            pass

    return hear(connection)


def until(connection: socket.socket, end: bytes) -> bytes:
    connection.settimeout(TIMEOUT_S)
    heard = b""
    while end not in heard:
        data = connection.recv(65536)
        assert data, f"closed after {heard!r}"
        heard += data

    return heard


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_the_head_limit_is_what_the_documents_say() -> None:
    assert (MAX_HEAD_BYTES, MAX_FIELDS, MAX_CHUNKS, MAX_PIPELINED) == (65536, 128, 65536, 16)


def test_a_request_that_goes_on_after_the_end_is_cut_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(PatientProtocol, finish_s=1) as served:
        connection = served.connect()
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: served.app.heard)

    with connection:
        assert hear(connection) == b""

    assert not any(record.exc_info for record in caplog.records)
