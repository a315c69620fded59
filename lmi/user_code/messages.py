"""Messages between a front end and the process of user code, in msgpack. Any other bytes close the connection.

A call is a request to `handle`, or a request with formatters, which run in one call, so that the second finds the
object that the first made. The front end chooses its id, with which each message comes. A call ends with `End`, or
`Drop` from the front end. The worker sends at most WINDOW chunks of `handle` more than were `Taken`, so a slow client
slows the code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lmi.errors import ErrorInfo
from lmi.shared.state import Block, EngineRecord
from lmi.types import Token

WINDOW = 32  # chunks of one call that are sent and not taken yet
MAX_CHUNK_BYTES = 1 << 20


def ends(folder: Path, block: Block) -> list[tuple[str, EngineRecord]]:
    """Return the socket and the record of each process of user code. As the model it has the engines' records."""
    return [(str(folder / f"code-{slot}.sock"), each) for slot, each in enumerate(block.formatters or block.engines)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Handle(_Message, frozen=True, tag="handle"):
    properties: dict[str, str]
    query: dict[str, str]
    body: bytes


class ReadInput(_Message, frozen=True, tag="read_input"):
    """Run the input formatter. One chunk comes back, the body that it made. The call stays open for an Open."""

    properties: dict[str, str]
    body: bytes


class Open(_Message, frozen=True, tag="open"):
    """Begin the answers, one for each prompt. A Head comes back, then one chunk for each Feed.

    `fields` is the request's body without the prompt. `details` and `return_full_text` have their defaults applied.
    """

    prompts: list[str]
    fields: dict[str, Any]
    is_streaming: bool
    details: bool
    return_full_text: bool


class Feed(_Message, frozen=True, tag="feed"):
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


class Respond(_Message, frozen=True, tag="respond"):
    """Rewrite an object or chunk of another API's response, given as JSON. One chunk comes back."""

    body: bytes


class Taken(_Message, frozen=True, tag="taken"):
    """The front end took one chunk."""


class Drop(_Message, frozen=True, tag="drop"):
    """The front end does not wait for the call any more."""


class Head(_Message, frozen=True, tag="head"):
    """Status and headers. `media_type` is "" if there is no body, or if the code names none."""

    status: int
    media_type: str
    headers: dict[str, str]
    is_streaming: bool = False  # send the chunks on as they arrive


class End(_Message, frozen=True, tag="end"):
    """Nothing follows. The error is what the code raised."""

    error: ErrorInfo | None = None


Work = Handle | ReadInput | Open | Feed | Respond  # what the code works on
ToWorker = Work | Taken | Drop
ToFrontEnd = Head | bytes | End  # bytes are a chunk of a body

encode: Callable[[tuple[int, ToWorker | ToFrontEnd]], bytes] = msgspec.msgpack.Encoder().encode
# They raise msgspec.DecodeError or ValidationError for any other bytes.
decode_to_worker: Callable[[bytes], tuple[int, ToWorker]] = msgspec.msgpack.Decoder(tuple[int, ToWorker]).decode
decode_to_front_end: Callable[[bytes], tuple[int, ToFrontEnd]] = msgspec.msgpack.Decoder(tuple[int, ToFrontEnd]).decode
