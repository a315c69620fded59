"""What an API is: how it reads a body, how it answers, and how it writes errors.

bytes --read--> Message[Format] --parse--> Parsed[Format] --formatter--> Formatter[Format] --> bytes
"""

from collections.abc import Callable
from typing import Any, Generic, Self

from msgspec import Struct
from msgspec.structs import replace

from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.errors import ErrorRules
from lmi.apis.base.formatters import Formatter
from lmi.apis.base.media_types import JSON
from lmi.settings.config import ModelConfig
from lmi.types import Format


class Api(Struct, Generic[Format], frozen=True):
    """One API.

    `read` decodes a body and checks it as a whole (else MalformedRequest), `parse` checks its
    fields (else InvalidParameter or Unsupported). `default_format` is the format of the answer to a
    body that `read` refuses. `read_for_events` reads the body of a client whose Accept asks for
    server-sent events. At /invocations a request selects the API with one of its `paths` as the
    route in Custom-Attributes, or with `body_field` in its body.
    """

    name: str
    default_format: Callable[[ModelConfig], Format]
    read: Callable[[bytes, str | None, ModelConfig], Message[Format]]
    parse: Callable[[Message[Format]], Parsed[Format]]
    formatter: Callable[[Parsed[Format]], Formatter[Format]]
    errors: ErrorRules
    read_for_events: Callable[[bytes, str | None, ModelConfig], Message[Format]] | None = None
    # The paths of the routes that this API answers by POST.
    paths: tuple[str, ...] = ()
    # Beginnings of further paths, whose 404, 405 and similar errors have this API's form.
    prefixes: tuple[str, ...] = ()
    body_field: str = ""
    # Formatters of user code take part.
    takes_user_code: bool = False
    # This ends an answer that is one JSON value.
    json_end: bytes = b""

    def whole(self, media_type: str, body: bytes) -> bytes:
        """Return a body that is sent in one piece, with `json_end` if it is JSON."""
        return body + self.json_end if media_type == JSON else body

    def for_accept(self, accept: str) -> Self:
        """Return the API for a client with this Accept: whose streams are events, if it asks for
        them.
        """
        if self.read_for_events is None or "text/event-stream" not in accept.lower():
            return self

        return replace(self, read=self.read_for_events)


AnyApi = Api[Any]
