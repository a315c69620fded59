"""What a front end and a code worker say to each other.

A call is a request to `handle`, a body for the input formatter, or an answer on its way through the output formatter;
its id is the front end's, unique on its connection. Pieces come in windows: the worker sends no more than WINDOW of
them before the front end has taken one (`Taken`), so a slow client slows the code that writes for it. A call ends with
an `End` or a `Failed`, or where the front end says `Drop`. Encoding is msgpack of typed structs, as on the engines'
sockets; anything else closes the connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

WINDOW = 32  # pieces of one call on their way
MAX_PIECE_BYTES = 1 << 20


class Handle(msgspec.Struct, frozen=True, tag="handle", array_like=True):
    call_id: int
    properties: dict[str, str]
    query: dict[str, str]
    body: bytes


class ReadInput(msgspec.Struct, frozen=True, tag="read_input", array_like=True):
    """Answered with a Head and the body of an LMI request."""

    call_id: int
    properties: dict[str, str]
    body: bytes


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """An answer begins. Each Feed after it is answered with one Piece; the one with a reason is the last."""

    call_id: int
    prompt: str
    parameters: dict[str, Any]


class Feed(msgspec.Struct, frozen=True, tag="feed", array_like=True):
    call_id: int
    tokens: list[tuple[int, str, float | None, bool]]  # id, text, log_prob, is_special
    finish_reason: str | None


class Taken(msgspec.Struct, frozen=True, tag="taken", array_like=True):
    call_id: int


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    call_id: int


class Head(msgspec.Struct, frozen=True, tag="head", array_like=True):
    call_id: int
    status: int
    media_type: str  # "": the answer does not say
    headers: dict[str, str]
    is_streaming: bool  # its pieces are wanted as they come


class Piece(msgspec.Struct, frozen=True, tag="piece", array_like=True):
    call_id: int
    data: bytes


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    call_id: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The code raised; the message is the exception's."""

    call_id: int
    message: str


ToWorker = Handle | ReadInput | Open | Feed | Taken | Drop
ToFrontEnd = Head | Piece | End | Failed

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_front_end: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)


def encode(message: ToWorker | ToFrontEnd) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Raises msgspec.DecodeError or ValidationError for anything that is not one of ours."""
    return _to_worker.decode(frame)


def decode_to_front_end(frame: bytes) -> ToFrontEnd:
    return _to_front_end.decode(frame)
