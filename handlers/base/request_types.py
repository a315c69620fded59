"""Checks the types of a request's values, once for every engine.

msgspec checks none when Python builds a struct, and a value of a wrong type would fail a step of all that run in it, or
end the engine. What counts as an integer, a number or a list, as numpy's do, becomes a plain one.
"""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from lmi.errors import InvalidRequest
from lmi.executor import Request


class WrongType(InvalidRequest, TypeError):
    """A request has a value of a wrong type. For a program that uses the library it is a TypeError too."""


def checked(request: Request) -> Request:
    """The request with plain values. Raises WrongType."""
    try:
        return _DECODER.decode(_ENCODER.encode(request))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise WrongType(f"the request has a value of a wrong type: {error}") from None


def _plain(value: Any) -> object:
    """What msgspec can write of a value that it does not know. Raises TypeError."""
    if hasattr(value, "__iter__"):
        return list(value)
    return operator.index(value) if hasattr(value, "__index__") else float(value)


_ENCODER, _DECODER = msgspec.msgpack.Encoder(enc_hook=_plain), msgspec.msgpack.Decoder(Request)
