"""What a body says to those who look at it before its schema reads it: limits, routes, sessions, choice of a model."""

from __future__ import annotations

from typing import Self

import msgspec

LEFT_OUT = (msgspec.Raw(), msgspec.Raw(b"null"))
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
PROMPTS = ("inputs", "messages", "prompt")  # by which the bodies of one path differ


class BodyOutline(msgspec.Struct):
    """The fields that are looked at first. Their values stay raw, so a long prompt costs little time."""

    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text_input: msgspec.Raw = msgspec.Raw()
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
