"""An HTTP server on loopback that answers as its subclass says, except where a test
lets it fail.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

PIECE = 16 << 10


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Rule:
    """What happens to the next requests that match."""

    pattern: re.Pattern[str]  # of "METHOD /path?query"
    times: int
    # Instead of the real one
    answer: Answer | None = None
    # Bytes of the body, then the connection breaks
    cut_after: int | None = None
    # Bytes of the body, then it waits for `released`
    hold_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)  # a request waits


class FaultyServer:
    def __init__(self) -> None:
        self.requests: list[str] = []  # "METHOD /path"
        # Of the last such request, names in lower case
        self.headers: dict[str, dict[str, str]] = {}
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        raise NotImplementedError

    # What a test can ask for.

    def fail(self, pattern: str, status: int, times: int = 1, **headers: str) -> None:
        """Answer the next `times` requests with this status; underscores in the names of headers
        are dashes.
        """
        headers_set = {name.replace("_", "-"): value for name, value in headers.items()}
        self._rules.append(Rule(re.compile(pattern), times, Answer(status, headers_set, b"{}")))

    def replace(self, pattern: str, answer: Answer, times: int = 1) -> None:
        self._rules.append(Rule(re.compile(pattern), times, answer))

    def cut(self, pattern: str, after: int, times: int = 1, *, held: bool = False) -> Rule:
        """Break the connection after so many bytes of the body, if it is held when the test sets
        `released`.
        """
        rule = Rule(re.compile(pattern), times, cut_after=after, hold_after=after if held else None)
        self._rules.append(rule)
        return rule

    def hold(self, pattern: str, after: int, times: int = 1) -> Rule:
        """Wait after so many bytes of the body until the test sets `released`."""
        rule = Rule(re.compile(pattern), times, hold_after=after)
        self._rules.append(rule)
        return rule

    def num_requests(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)

    # The server.

    def _rule(self, request: str) -> Rule:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.times and rule.pattern.search(request):
                    rule.times -= 1
                    return rule

        return Rule(re.compile(""), 0)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                request = f"{self.command} {self.path}"
                server.headers[request] = {
                    name.lower(): value for name, value in self.headers.items()
                }
                rule = server._rule(request)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = rule.answer or server.answer(self.command, self.path, self.headers, body)
                with suppress(ConnectionError):
                    self._send(answer, rule)

            def _send(self, answer: Answer, rule: Rule) -> None:
                self.send_response(answer.status)
                header_names = {name.lower() for name in answer.headers}
                for name, value in answer.headers.items():
                    self.send_header(name, value)

                if "content-length" not in header_names and "transfer-encoding" not in header_names:
                    self.send_header("Content-Length", str(len(answer.body)))

                self.end_headers()
                if self.command == "HEAD":
                    return

                stop = rule.cut_after if rule.cut_after is not None else rule.hold_after
                first = answer.body if stop is None else answer.body[:stop]
                self.wfile.write(first)
                if rule.hold_after is not None:
                    self.wfile.flush()
                    rule.reached.set()
                    rule.released.wait(60)

                if rule.cut_after is not None:
                    self.close_connection = True
                    return

                self.wfile.write(answer.body[len(first) :])

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rule in self._rules:
            rule.released.set()

        self._server.shutdown()
        self._server.server_close()
