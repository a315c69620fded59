"""What a front end and a code worker say to each other.

A call is a request to `handle`, or one that passes through the formatters: its body through the one for inputs, its
answers through the one for outputs, or both, so that the second finds what the first has read. Its id is the front
end's, unique on its connection. The pieces of `handle` come in windows: the worker sends no more than WINDOW of them
before the front end has taken one (`Taken`), so a slow client slows the code that writes for it. A call ends with an
`End` or a `Failed`, or where the front end says `Drop`. Encoding is msgpack of typed structs, as on the engines'
sockets; anything else closes the connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

WINDOW = 32  # pieces of one call on their way
MAX_PIECE_BYTES = 1 << 20

TokenFields = tuple[int, str, float | None, bool]  # id, text, log_prob, is_special


class Handle(msgspec.Struct, frozen=True, tag="handle", array_like=True):
    call_id: int
    properties: dict[str, str]
    query: dict[str, str]
    body: bytes


class ReadInput(msgspec.Struct, frozen=True, tag="read_input", array_like=True):
    """Answered with one Piece, the body of a request. The call stays open, so that an Open can follow."""

    call_id: int
    properties: dict[str, str]
    body: bytes


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """Answers begin, one for each prompt. Each Feed is answered with one Piece, before the first of them with a Head.

    `fields` are those of the request's body beside the prompt; `details` and `return_full_text` as they count for it.
    """

    call_id: int
    prompts: list[str]
    fields: dict[str, Any]
    is_streaming: bool
    details: bool
    return_full_text: bool


class Feed(msgspec.Struct, frozen=True, tag="feed", array_like=True):
    """New tokens of the answer to the prompt at `index`, with a reason where it ends; the last end ends the call.

    `top_tokens` (for each token) and `prefill` are there where the request asked for them. The prompt's token ids and
    `prefill` stand in the first Feed of a prompt.
    """

    call_id: int
    index: int
    tokens: list[TokenFields]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    top_tokens: list[list[TokenFields]] | None = None
    prompt_token_ids: list[int] | None = None
    prefill: list[TokenFields] | None = None


class Respond(msgspec.Struct, frozen=True, tag="respond", array_like=True):
    """A response that has a form already, or a chunk of one: the JSON of an object. Answered with one Piece."""

    call_id: int
    body: bytes


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
    is_out_of_memory: bool = False


Work = Handle | ReadInput | Open | Feed | Respond  # what the code works on
ToWorker = Work | Taken | Drop
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
