"""What an API is: how it reads a body, how it answers, and which status each error has there.

A row holds a few functions. `read` decodes the body and chooses the format of its answer, `parse` checks its requests,
`formatter` writes their answer, and `errors` writes errors. Nothing here does I/O.

    bytes --read--> Message[Format] --parse--> Parsed[Format] --formatter--> Formatter[Format] --> bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic

from lmi.apis.base.errors import ErrorRules, Rendered
from lmi.apis.base.formatter import Formatter
from lmi.apis.base.openapi import JSON
from lmi.apis.base.readers import Message, Parsed
from lmi.errors import LmiError
from lmi.settings.config import ModelConfig
from lmi.types import Format


@dataclass(frozen=True, slots=True)
class Api(Generic[Format]):
    """One API.

    `default_format` is the format of the answer to a body that `read` refuses. `read_for_events` reads the body of a
    client whose Accept asks for server-sent events. At /invocations a request selects the API with one of its `paths`
    as the route in Custom-Attributes, or with `body_field` in its body.
    """

    name: str
    default_format: Callable[[ModelConfig], Format]
    read: Callable[[bytes, str | None, ModelConfig], Message[Format]]
    parse: Callable[[Message[Format]], Parsed[Format]]
    formatter: Callable[[Parsed[Format]], Formatter[Format]]
    errors: ErrorRules[Format]
    read_for_events: Callable[[bytes, str | None, ModelConfig], Message[Format]] | None = None
    paths: tuple[str, ...] = ()  # of the routes that this API answers by POST
    prefixes: tuple[str, ...] = ()  # of further paths whose 404, 405 and similar errors have this API's form
    body_field: str = ""
    takes_user_code: bool = False  # formatters of user code take part
    json_end: bytes = b""  # ends an answer that is one JSON value

    def render_error(self, error: LmiError, format: Format, *, accepted: bool) -> Rendered:
        return self.errors.render(error, format, accepted=accepted)

    def render_status(self, status: int, message: str, format: Format) -> Rendered:
        return self.errors.render_status(status, message, format)

    def whole(self, media_type: str, body: bytes) -> bytes:
        """Return a body that is sent in one piece, with `json_end` if it is JSON."""
        return body + self.json_end if media_type == JSON else body

    def for_accept(self, accept: str) -> Api[Format]:
        """Return this API with the `read` for a client with this Accept header."""
        if self.read_for_events is None or "text/event-stream" not in accept.lower():
            return self
        return replace(self, read=self.read_for_events)


AnyApi = Api[Any]
