"""A container with a WebSocket, whose path says how it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

STREAM = "/invocations-bidirectional-stream"
FLOOD_MESSAGE = b"x" * (256 << 10)
NUM_FLOOD_MESSAGES = 80


class SocketContainer:
    """It keeps what each request asked for."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        # Of WebSockets that have ended, the code of the client by the request's path and query.
        self.codes: dict[str, int | None] = {}
        self.num_flooded = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what opens no WebSocket."""
        if request.path == "/ping":
            return connection.respond(HTTPStatus.OK, "")

        self.requests.append(request)
        if request.path == "/refused":
            return connection.respond(HTTPStatus.NOT_FOUND, "no such path\n")

        return None

    def __call__(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        path = connection.request.path
        try:
            SCRIPTS[path.partition("?")[0]](self, connection)
            connection.close()
        except ConnectionClosed:
            pass
        finally:
            self.codes[path] = connection.close_code

    def echo(self, connection: ServerConnection) -> None:
        for message in connection:
            connection.send(message)

    def tell_frames(self, connection: ServerConnection) -> None:
        """Answer with the frames of a message."""
        while True:
            connection.send(json.dumps([str(frame) for frame in connection.recv_streaming()]))

    def send_frames(self, connection: ServerConnection) -> None:
        connection.send(iter([b"one", b"two", b"three"]))
        connection.send("x" * (1_500_000))

    def end(self, connection: ServerConnection) -> None:
        connection.send("last words")

    def break_down(self, connection: ServerConnection) -> None:
        connection.send("first words")
        connection.close(1011, "the engine is lost")

    def tell_error(self, connection: ServerConnection) -> None:
        error = {"ErrorCode": "Cuda", "Message": "out of memory"}
        connection.send(json.dumps({"ModelStreamError": error}, separators=(",", ":")))
        connection.recv()

    def cut(self, connection: ServerConnection) -> None:
        connection.socket.close()

    def flood(self, connection: ServerConnection) -> None:
        for _ in range(NUM_FLOOD_MESSAGES):
            connection.send(FLOOD_MESSAGE)
            self.num_flooded += 1


SCRIPTS: dict[str, Callable[[SocketContainer, ServerConnection], None]] = {
    STREAM: SocketContainer.echo,
    "/frames": SocketContainer.tell_frames,
    "/fragments": SocketContainer.send_frames,
    "/end": SocketContainer.end,
    "/break": SocketContainer.break_down,
    "/error": SocketContainer.tell_error,
    "/cut": SocketContainer.cut,
    "/flood": SocketContainer.flood,
}


@contextmanager
def socket_container() -> Iterator[SocketContainer]:
    container = SocketContainer()
    options = {"process_request": container.answer_request, "compression": None}
    with serve(container, "127.0.0.1", 0, **options) as server:
        container.port = server.socket.getsockname()[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield container
        server.shutdown()
        thread.join()
