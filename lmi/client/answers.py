"""Reads what a server answers, which may be any server: how much it sends, and in which form, is
not known before.

What is too long is not read to its end. Whatever has another form than OpenAI's API gives it is an
OddAnswer.
"""

import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import orjson

from lmi.errors import shorten

# 2,048 embeddings of 3,072 numbers are about 125 million bytes.
MAX_ANSWER_BYTES = 128 << 20
MAX_LINE_BYTES = 16 << 20
MAX_ERROR_BYTES = 1 << 20
MAX_MESSAGE_CHARS = 500

# The pause before a busy server is asked again, if it names none, and the longest one.
PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

Json = dict[str, Any]


class OddAnswer(ValueError):
    """An answer is too long, or has not the form that it should have."""


class LineCutter:
    """Cuts the pieces of an answer into lines. Neither a line nor all of them together may be
    endless.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        # The beginning of a line that has not ended yet.
        self._line = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in a piece. Raises OddAnswer."""
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise OddAnswer(f"the answer has over {MAX_ANSWER_BYTES} bytes")

        *ends, beginning = piece.split(b"\n")
        lines = []
        for end in ends:
            self._line += end
            lines.append(bytes(self._line).rstrip(b"\r"))
            self._line.clear()

        self._line += beginning
        if len(self._line) > MAX_LINE_BYTES:
            raise OddAnswer(f"a line of the answer has over {MAX_LINE_BYTES} bytes")

        return lines

    def last(self) -> list[bytes]:
        """Return the line that no line break ends, if there is one."""
        return [bytes(self._line)] if self._line else []


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of an answer that comes in pieces. Raises OddAnswer."""
    lines = LineCutter()
    for piece in pieces:
        yield from lines.feed(piece)

    yield from lines.last()


async def lines_of_async(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of an answer that comes in pieces. Raises OddAnswer."""
    lines = LineCutter()
    async for piece in pieces:
        for line in lines.feed(piece):
            yield line

    for line in lines.last():
        yield line


class BoundedBody:
    """Puts the pieces of a body together: all of a success, and as many of an error as its message
    needs.
    """

    def __init__(self, is_success: bool) -> None:
        self._is_success = is_success
        self._data = bytearray()

    def feed(self, piece: bytes) -> bool:
        """Add a piece. Returns whether more is wanted. Raises OddAnswer."""
        self._data += piece
        if self._is_success and len(self._data) > MAX_ANSWER_BYTES:
            raise OddAnswer(f"the answer has over {MAX_ANSWER_BYTES} bytes")

        return self._is_success or len(self._data) < MAX_ERROR_BYTES

    @property
    def data(self) -> bytes:
        """What has come, of an error at most MAX_ERROR_BYTES."""
        if self._is_success:
            return bytes(self._data)

        return bytes(self._data[:MAX_ERROR_BYTES])


def whole_of(pieces: Iterable[bytes], is_success: bool) -> bytes:
    """Return the body that comes in pieces. Raises OddAnswer."""
    body = BoundedBody(is_success)
    for piece in pieces:
        if not body.feed(piece):
            break

    return body.data


async def whole_of_async(pieces: AsyncIterable[bytes], is_success: bool) -> bytes:
    """Return the body that comes in pieces. Raises OddAnswer."""
    body = BoundedBody(is_success)
    async for piece in pieces:
        if not body.feed(piece):
            break

    return body.data


def json_or_page(body: bytes) -> Any:
    """Return the JSON of an answer. A proxy may answer with a page, which becomes an error."""
    try:
        return orjson.loads(body)
    except ValueError:
        return {"error": body.decode(errors="replace")}


def message_of(body: Any) -> str:
    """Return what an answer says of an error, in one line."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else str(body)
    line = " ".join(text[: 4 * MAX_MESSAGE_CHARS].split())
    if len(line) > MAX_MESSAGE_CHARS:
        line = f"{line[:MAX_MESSAGE_CHARS]} ..."

    return line


def object_of(data: bytes) -> Json:
    """Return the JSON object that an answer or a line of it is. Raises OddAnswer."""
    try:
        value = orjson.loads(data)
    except ValueError:
        raise OddAnswer(f"not JSON: {shorten(data.decode(errors='replace'))}") from None

    return _as_object("the answer", value)


def first_model_of(body: bytes) -> str:
    """Return the name of the first model of a list. Raises OddAnswer."""
    models = object_of(body).get("data")
    if not isinstance(models, list) or not models:
        raise OddAnswer(f"no list of models: data is {shorten(models)}")

    name = _as_object("a model", models[0]).get("id")
    if not isinstance(name, str):
        raise OddAnswer(f"no list of models: the id of one is {shorten(name)}")

    return name


def choices_of(chunk: Json) -> list[Json]:
    """Return the choices in a chunk of a streamed answer. Raises OddAnswer."""
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        raise OddAnswer(f"choices is no list: {shorten(choices)}")

    return [_as_object("a choice", choice) for choice in choices]


def delta_text(choice: Json) -> str:
    """Return what a choice of a chat adds to the content. Raises OddAnswer."""
    delta = _as_object("delta", choice.get("delta"))
    return _text("content", delta.get("content"))


def completion_text(choice: Json) -> str:
    """Return what a choice of a completion adds. Raises OddAnswer."""
    return _text("text", choice.get("text"))


def waiting_text(chunk: Json) -> str:
    """Return what a chunk says of an answer that has no token yet, "" for any other chunk."""
    status = chunk.get("queue_status")
    progress = chunk.get("prompt_progress")
    place = _number(status, "queue_position")
    wait_s = _number(status, "estimated_wait_seconds")
    total = _number(progress, "total")

    facts = []
    if place > 0:
        facts.append(f"place {place:.0f}")
    elif total > 0:
        share = _number(progress, "processed") / total
        facts.append(f"{share:.0%} of the prompt")

    if wait_s > 0:
        facts.append(f"about {wait_s:.0f} s")

    return f"waiting: {', '.join(facts)}" if facts else ""


def pause_of(headers: Mapping[str, str]) -> tuple[float, str]:
    """Return for how many seconds to wait before asking a busy server again, and a warning if the
    server asked for a longer time.
    """
    retry_after = headers.get("Retry-After", "")
    try:
        pause_s = float(retry_after)
    except ValueError:
        # There is none, or it is a date.
        return PAUSE_S, ""

    if math.isnan(pause_s):
        return PAUSE_S, ""

    if pause_s > MAX_PAUSE_S:
        warning = (
            f"the server says Retry-After: {shorten(retry_after)}; "
            f"asking again after {MAX_PAUSE_S:g} s"
        )
        return MAX_PAUSE_S, warning

    return max(0.0, pause_s), ""


def _as_object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise OddAnswer(f"{name} is no JSON object: {shorten(value)}")

    return value


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""

    if not isinstance(value, str):
        raise OddAnswer(f"{name} is no text: {shorten(value)}")

    return value


def _number(owner: Any, name: str) -> float:
    """Return a number of an object, 0 where there is none."""
    value = owner.get(name) if isinstance(owner, dict) else None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)

    return 0.0
