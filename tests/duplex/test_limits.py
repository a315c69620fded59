"""What a WebSocket takes from a hostile or broken client, frame by frame."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from websockets.frames import Close, Frame, Opcode
from websockets.sync.client import connect

from lmi.duplex.paths import STREAM
from lmi.http.websocket import MAX_FRAMES, WebSocketProtocol
from tests.scripted import Host, HostProtocol, host, wait_until

MAX_BYTES = 1 << 20
TIMEOUT_S = 60.0
NUM_FLOODS = 30
HANDSHAKE = (
    f"GET {STREAM} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


class HastyProtocol(HostProtocol):
    max_message_bytes = MAX_BYTES
    body_timeout_s = stall_timeout_s = 0.6
    ping_s = 0.8


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("limits"), protocol=HastyProtocol) as started:
        yield started


@dataclass
class Raw:
    """A client that writes its own frames."""

    socket: socket.socket
    rest: bytes = field(default=b"")

    def send(self, opcode: Opcode, data: bytes, *, fin: bool = True) -> None:
        self.socket.sendall(Frame(opcode, data, fin).serialize(mask=True))

    def read(self) -> tuple[Opcode, bytes]:
        """The next frame of the server, which has no mask."""
        first, size = self._take(2)
        if size == 126:
            (size,) = struct.unpack("!H", self._take(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._take(8))

        return Opcode(first & 0x0F), self._take(size)

    def close_code(self) -> int:
        """The code with which the server closes, whatever it says before."""
        while True:
            opcode, data = self.read()
            if opcode is Opcode.CLOSE:
                return Close.parse(data).code

    def _take(self, num_bytes: int) -> bytes:
        while len(self.rest) < num_bytes:
            more = self.socket.recv(65536)
            assert more, "the server has closed"
            self.rest += more

        data, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return data


@contextmanager
def opened(lmi: Host, more: bytes = b"") -> Iterator[Raw]:
    with socket.socket() as raw:
        # A client that reads nothing is noticed sooner.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        raw.settimeout(TIMEOUT_S)
        raw.connect(("127.0.0.1", lmi.port))
        raw.sendall(HANDSHAKE.encode() + b"\r\n" + more)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += raw.recv(65536)

        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b" 101 " in head, head
        yield Raw(raw, rest)


def assert_serves(lmi: Host) -> None:
    with connect(f"ws://127.0.0.1:{lmi.port}{STREAM}") as websocket:
        websocket.send(json.dumps({"inputs": "say hi"}))
        assert json.loads(websocket.recv(timeout=TIMEOUT_S)) == {"generated_text": "hi"}


def test_a_message_may_be_as_large_as_a_body_and_no_larger(lmi: Host) -> None:
    with opened(lmi) as client:
        client.send(Opcode.TEXT, b'{"inputs": "%b"}' % (b"x" * (MAX_BYTES - 14)))
        opcode, data = client.read()
        assert opcode is Opcode.TEXT and b"inputs" in data

        client.send(Opcode.TEXT, bytes(MAX_BYTES + 1))
        assert client.close_code() == 1009


def test_a_message_in_frames_is_one_and_is_measured_as_one(lmi: Host) -> None:
    with opened(lmi) as client:
        client.send(Opcode.TEXT, b'{"inputs":', fin=False)
        client.send(Opcode.PING, b"between")
        client.send(Opcode.CONT, b'"say hi"}')
        assert client.read() == (Opcode.PONG, b"between")
        assert client.read() == (Opcode.TEXT, b'{"generated_text": "hi"}')

        client.send(Opcode.BINARY, bytes(MAX_BYTES - 1), fin=False)
        client.send(Opcode.CONT, bytes(2))
        assert client.close_code() == 1009


def test_a_message_of_very_many_small_frames_is_refused(lmi: Host) -> None:
    with opened(lmi) as client:
        client.send(Opcode.TEXT, b"", fin=False)
        for _ in range(MAX_FRAMES):
            client.send(Opcode.CONT, b"x", fin=False)

        assert client.close_code() == 1008


def test_a_message_that_does_not_end_is_cut_and_counts_until_then(lmi: Host) -> None:
    with opened(lmi) as client:
        whole = Frame(Opcode.TEXT, bytes(5000)).serialize(mask=True)
        client.socket.sendall(whole[:4000])
        wait_until(lambda: WebSocketProtocol.num_partial_bytes > 3000)
        assert client.close_code() == 1008

    wait_until(lambda: WebSocketProtocol.num_partial_bytes == 0)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (Frame(Opcode.TEXT, b"\xff").serialize(mask=True), 1007),
        (Frame(Opcode.CONT, b"x").serialize(mask=True), 1002),
        (Frame(Opcode.TEXT, b"{}").serialize(mask=False), 1002),
        (b"\xc1\x80" + bytes(4), 1002),
        (b"\x09\x80" + bytes(4), 1002),
        (b"\x83\x80" + bytes(4), 1002),
        (b"\x88\x81" + bytes(5), 1002),
    ],
    ids=["not UTF-8", "no first", "no mask", "compressed", "cut ping", "opcode 3", "bad close"],
)
def test_a_frame_that_breaks_the_rules_ends_the_connection(
    lmi: Host, frame: bytes, code: int
) -> None:
    with opened(lmi) as client:
        client.socket.sendall(frame)
        assert client.close_code() == code


def test_a_client_that_sends_before_it_was_let_in_is_refused(lmi: Host) -> None:
    frame = Frame(Opcode.TEXT, b"{}").serialize(mask=True)
    with pytest.raises(AssertionError, match="400"), opened(lmi, frame):
        pass


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("Content-Length: 3", 426),
        ("Transfer-Encoding: chunked", 426),
        ("Host: another", 400),
        ("X-Long: " + "x" * 9000, 431),
        ("X-Long: " + "x" * 70_000, 431),
        ("Sec-WebSocket-Version: 12", 400),
        ("Sec-WebSocket-Key: short", 400),
    ],
)
def test_a_handshake_with_a_fault_is_refused(lmi: Host, line: str, status: int) -> None:
    body = b"3\r\nabc\r\n0\r\n\r\n" if "chunked" in line else b"abc" if "Length" in line else b""
    with socket.create_connection(("127.0.0.1", lmi.port), timeout=TIMEOUT_S) as raw:
        raw.sendall(f"{HANDSHAKE}{line}\r\n\r\n".encode() + body)
        assert int(raw.recv(65536).split()[1]) == status

    assert_serves(lmi)


def test_the_server_asks_whether_the_client_is_there(lmi: Host) -> None:
    with opened(lmi) as client:
        opcode, data = client.read()
        assert opcode is Opcode.PING
        client.send(Opcode.PONG, data)
        assert client.read()[0] is Opcode.PING
        # From here on nothing is answered.
        assert client.close_code() == 1011


def test_a_client_that_reads_nothing_is_cut_and_its_answers_end(lmi: Host) -> None:
    with opened(lmi) as client:
        for number in range(NUM_FLOODS):
            body = {"inputs": f"flood {'x' * 20}", "stream": True}
            client.send(Opcode.TEXT, json.dumps({"id": f"{number}", "body": body}).encode())

        wait_until(lambda: lmi.executor.num_active == NUM_FLOODS)
        for _ in range(10):
            client.send(Opcode.PING, bytes(125))

        wait_until(lambda: lmi.executor.num_active == 0)
        assert len(lmi.executor.cancelled) == NUM_FLOODS

    assert_serves(lmi)


def test_random_bytes_end_connections_and_nothing_else(lmi: Host) -> None:
    chance = random.Random(47)
    frame = Frame(Opcode.TEXT, b'{"id":"a","body":{"inputs":"say hi"}}').serialize(mask=True)
    for _ in range(200):
        data = bytearray(frame * 2)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)

        with opened(lmi) as client:
            client.socket.sendall(bytes(data))

    assert_serves(lmi)
    wait_until(lambda: WebSocketProtocol.num_open == 0)
    assert WebSocketProtocol.num_partial_bytes == 0
