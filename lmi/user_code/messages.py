"""Messages between a front end and the process of user code, in msgpack. Any other bytes close the connection.

A call is a request to `handle`, or a request with formatters, which run in one call, so that the second finds the
object that the first made. The front end chooses its id. It ends with `End`, or `Drop` from the front end.
The worker sends at most WINDOW chunks of `handle` more than were `Taken`, so a slow client slows the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lmi.errors import ErrorInfo
from lmi.types import Token

WINDOW = 32  # chunks of one call that are sent and not taken yet
MAX_CHUNK_BYTES = 1 << 20


class OfCall(msgspec.Struct, frozen=True, array_like=True):
    """A message of the call with this id."""

    call_id: int


class Handle(OfCall, frozen=True, tag="handle"):
    properties: dict[str, str]
    query: dict[str, str]
    body: bytes


class ReadInput(OfCall, frozen=True, tag="read_input"):
    """Run the input formatter. One BodyChunk comes back, the body that it made. The call stays open for an Open."""

    properties: dict[str, str]
    body: bytes


class Open(OfCall, frozen=True, tag="open"):
    """Begin the answers, one for each prompt. A Head comes back, then one BodyChunk for each Feed.

    `fields` is the request's body without the prompt. `details` and `return_full_text` have their defaults applied.
    """

    prompts: list[str]
    fields: dict[str, Any]
    is_streaming: bool
    details: bool
    return_full_text: bool


class Feed(OfCall, frozen=True, tag="feed"):
    """New tokens of the answer to the prompt at `index`. The call ends when each answer has a `finish_reason`.

    Tokens have `top`, and there is `prefill`, if the request asked for them. `prefill` and the prompt's token ids come
    with the first Feed of a prompt.
    """

    index: int
    tokens: list[Token]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    prefill: list[Token] | None = None


class Respond(OfCall, frozen=True, tag="respond"):
    """Rewrite an object or chunk of another API's response, given as JSON. One BodyChunk comes back."""

    body: bytes


class Taken(OfCall, frozen=True, tag="taken"):
    """The front end took one BodyChunk."""


class Drop(OfCall, frozen=True, tag="drop"):
    """The front end does not wait for the call any more."""


class Head(OfCall, frozen=True, tag="head"):
    status: int
    media_type: str  # "" if the code names none
    headers: dict[str, str]
    is_streaming: bool  # send the chunks on as they arrive


class BodyChunk(OfCall, frozen=True, tag="chunk"):
    data: bytes


class End(OfCall, frozen=True, tag="end"):
    """Nothing follows. The error is what the code raised."""

    error: ErrorInfo | None = None


Work = Handle | ReadInput | Open | Feed | Respond  # what the code works on
ToWorker = Work | Taken | Drop
ToFrontEnd = Head | BodyChunk | End

encode: Callable[[ToWorker | ToFrontEnd], bytes] = msgspec.msgpack.Encoder().encode
# They raise msgspec.DecodeError or ValidationError for any other bytes.
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_front_end: Callable[[bytes], ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd).decode
