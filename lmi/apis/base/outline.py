"""What a body says to those who look at it before its schema reads it: routes, sessions, the choice of a model."""

from __future__ import annotations

from typing import Self

import msgspec

LEFT_OUT = (msgspec.Raw(), msgspec.Raw(b"null"))


class Outline(msgspec.Struct):
    """The fields by which the bodies of one path differ. Their values stay raw, so a long prompt costs little time."""

    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()

    @classmethod
    def of(cls, body: bytes) -> Self | None:
        """Return the outline of a body, or None if it is not the JSON of an object. Its schema reports the fault."""
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def has(self, field: str) -> bool:
        """Whether the body has the field. null means "left out"."""
        return getattr(self, field) not in LEFT_OUT
