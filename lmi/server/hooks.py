"""What the model's own code may change of one inference request. Here nothing.

A model that comes with such code has `lmi/user_code/hooks.py` in place of these.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.formatters import AsyncFormatter


class Content(NamedTuple):
    """A body, and its content type if it has one."""

    body: bytes
    content_type: str | None


class RequestHooks:
    """The moments of one request at which the model's own code may act.

    `lmi/server/respond.py` calls the methods in this order, each at most once. `api` is the API
    that the body has chosen.
    """

    # Whether `change_body` may return another body. If so the body that comes in may have any
    # content type and any fields.
    changes_bodies = False

    async def change_body(self, body: bytes, content_type: str | None) -> Content:
        """Called with the bytes of the body, before the API is chosen and anything is decoded."""
        return Content(body, content_type)

    def change_message(self, api: AnyApi, message: Message[Any]) -> Message[Any]:
        """Called with the decoded body before its fields are checked. May change fields."""
        return message

    def message_to_keep(self, message: Message[Any]) -> Message[Any]:
        """Called with the decoded body when its fields are checked. What it returns is held until
        the answer begins, as the `message` of the methods below. Here no field is held.

        The fields are those that the client sent, without those of `change_message`.
        """
        return replace(message, fields={})

    def change_requests(
        self, api: AnyApi, message: Message[Any], parsed: Parsed[Any]
    ) -> Parsed[Any]:
        """Called when the requests count as in flight. May ask more of the engine."""
        return parsed

    def formatter(
        self, api: AnyApi, message: Message[Any], parsed: Parsed[Any], for_answer: Parsed[Any]
    ) -> AsyncFormatter:
        """Called next. Returns what writes the answer. `for_answer` has the requests without what
        only engines need, and may be held until the answer has ended.
        """
        return api.formatter(for_answer)

    def close(self) -> None:
        """Called when the request has ended, whatever ended it."""
