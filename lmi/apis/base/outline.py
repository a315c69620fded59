"""What a request says to those who look at it before a schema reads it, or where there is none.

A body says it to limits, routes, sessions and the choice of a model, and a query to the lists of models and adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import msgspec

from lmi.errors import InvalidParameter

LEFT_OUT = (msgspec.Raw(), msgspec.Raw(b"null"))
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MAX_ITEMS = 100  # of a page
LIMIT, TOKEN = "limit", "next_page_token"
PROMPTS = ("inputs", "messages", "prompt")  # by which the bodies of one path differ

T = TypeVar("T")


class BodyOutline(msgspec.Struct):
    """The fields that are looked at first. Their values stay raw, so a long prompt costs little time."""

    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text_input: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    request_type: msgspec.Raw = msgspec.field(name="requestType", default=msgspec.Raw())

    @classmethod
    def of(cls, body: bytes) -> Self | None:
        """Return the outline of a body, or None if it is not the JSON of an object. Its schema reports the fault."""
        try:
            return msgspec.json.decode(body, type=cls)
        except UNREADABLE:
            return None

    def has(self, field: str) -> bool:
        """Whether the body has the field. null means "left out"."""
        return getattr(self, field) not in LEFT_OUT

    def value(self, field: str) -> object:
        """Return the value of a field, or None if it is left out or cannot be read."""
        try:
            return msgspec.json.decode(getattr(self, field))
        except UNREADABLE:
            return None


def page(items: Sequence[T], query: Mapping[str, str]) -> tuple[list[T], dict[str, str]]:
    """Return the items of a page, and `nextPageToken` if there are more. Raises InvalidParameter for a bad token.

    A limit that is not a number from 1 to 100 counts as 100. The token is the number of items before the page.
    """
    limit, token = query.get(LIMIT, ""), query.get(TOKEN) or "0"
    if not _is_number(token):
        raise InvalidParameter(TOKEN, "a number that an earlier answer gave", token)
    num_items = int(limit) if _is_number(limit) and 1 <= int(limit) <= MAX_ITEMS else MAX_ITEMS
    start = int(token)
    end = start + num_items
    return list(items[start:end]), {"nextPageToken": str(end)} if end < len(items) else {}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
