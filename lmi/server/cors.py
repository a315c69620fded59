"""Answers for browsers: which pages of other origins may call this server, and which headers they may read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

READABLE = ("Retry-After", "X-Request-Id", "WWW-Authenticate")  # beside those that every page may read


class Application(Protocol):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def end_requests(self) -> None: ...


class CrossOrigin(CORSMiddleware):
    """The outermost application where `cors_allowed_origins` is given. A browser asks first, which needs no key."""

    def __init__(self, app: Application, origins: Sequence[str]) -> None:
        super().__init__(app, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=READABLE)
        self.end_requests = app.end_requests
