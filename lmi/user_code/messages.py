"""Messages between a front end and the process of user code.

A call is a request to `handle`, or a request with formatters: its body goes through the input formatter, its answers
through the output formatter. Both run in one call, so that the second finds the object that the first made. The front
end chooses the id of a call, unique on the connection.

`handle` has a window: the worker sends at most WINDOW chunks more than the front end has taken (`Taken`), so a slow
client slows the code that writes for it. A call ends with `End` or `Failed`, or with `Drop` from the front end.
Messages are typed structs in msgpack. Any other bytes close the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

WINDOW = 32  # chunks of one call that are sent and not taken yet
MAX_CHUNK_BYTES = 1 << 20

TokenFields = tuple[int, str, float | None, bool]  # id, text, log_prob, is_special


class Handle(msgspec.Struct, frozen=True, tag="handle", array_like=True):
    call_id: int
    properties: dict[str, str]
    query: dict[str, str]
    body: bytes


class ReadInput(msgspec.Struct, frozen=True, tag="read_input", array_like=True):
    """Run the input formatter. One BodyChunk comes back, the body that it made. The call stays open for an Open."""

    call_id: int
    properties: dict[str, str]
    body: bytes


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """Begin the answers, one for each prompt. A Head comes back, then one BodyChunk for each Feed.

    `fields` is the request's body without the prompt. `details` and `return_full_text` have their defaults applied.
    """

    call_id: int
    prompts: list[str]
    fields: dict[str, Any]
    is_streaming: bool
    details: bool
    return_full_text: bool


class Feed(msgspec.Struct, frozen=True, tag="feed", array_like=True):
    """New tokens of the answer to the prompt at `index`. The call ends when each answer has a `finish_reason`.

    `top_tokens` (for each token) and `prefill` are set if the request asked for them. `prefill` and the prompt's token
    ids come with the first Feed of a prompt.
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
    """Rewrite an object or chunk of another API's response, given as JSON. One BodyChunk comes back."""

    call_id: int
    body: bytes


class Taken(msgspec.Struct, frozen=True, tag="taken", array_like=True):
    """The front end took one BodyChunk."""

    call_id: int


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """The front end does not wait for the call any more."""

    call_id: int


class Head(msgspec.Struct, frozen=True, tag="head", array_like=True):
    call_id: int
    status: int
    media_type: str  # "" if the code names none
    headers: dict[str, str]
    is_streaming: bool  # send the chunks on as they arrive


class BodyChunk(msgspec.Struct, frozen=True, tag="chunk", array_like=True):
    call_id: int
    data: bytes


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    call_id: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The code raised an exception with this message."""

    call_id: int
    message: str
    is_out_of_memory: bool = False


Work = Handle | ReadInput | Open | Feed | Respond  # what the code works on
ToWorker = Work | Taken | Drop
ToFrontEnd = Head | BodyChunk | End | Failed

encode: Callable[[ToWorker | ToFrontEnd], bytes] = msgspec.msgpack.Encoder().encode
# They raise msgspec.DecodeError or ValidationError for any other bytes.
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_front_end: Callable[[bytes], ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd).decode
