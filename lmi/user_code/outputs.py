"""What user code returned, as the head and the bytes of a response."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterable, Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from lmi.user_code.calls import Head
from lmi.user_code.functions import synchronous
from lmi.user_code.multipart import content_type_of

if TYPE_CHECKING:
    from djl_python import Output

# The properties of an Output that the server itself turns into headers, or sets.
NOT_HEADERS = frozenset(
    {
        "content-type",
        "content-length",
        "transfer-encoding",
        "connection",
        "x-request-id",
    }
)
# Source: RFC 9110, sections 5.1 and 5.5.
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")
# The statuses whose responses have no body.
WITHOUT_BODY = (204, 205, 304)


def read_results(result: Any) -> Generator[object]:
    """Yield a handler's result, or each output of its generator. An output is finalized after it
    was used.
    """
    if hasattr(result, "__aiter__"):
        result = synchronous(result)
    elif not isinstance(result, Generator):
        result = _single(result)

    with closing(result) as outputs:
        for output in outputs:
            try:
                yield output
            finally:
                finalize = getattr(output, "finalizer", None)
                if finalize is not None:
                    finalize()

            if getattr(output, "is_last", False):
                return


def _single(result: object) -> Generator[object]:
    if result is not None:
        yield result


def read_head(output: Output, *, is_streaming: bool) -> Head:
    """Return the head of an Output's response. Raises ValueError for values that HTTP
    cannot carry.
    """
    properties = {str(name): str(value) for name, value in output.properties.items()}
    status = _status(output.code)
    is_streaming = is_streaming or output.stream_content is not None
    if status in WITHOUT_BODY:
        is_streaming = False

    has_body = is_streaming or not output.content.is_empty()
    media_type = content_type_of(properties) or output.media_type or ""
    if not media_type and has_body:
        media_type = "application/octet-stream"

    _check_header("content-type", media_type)
    headers = {}
    for name, value in properties.items():
        if name.lower() not in NOT_HEADERS:
            _check_header(name, value)
            headers[name] = value

    return Head(status, media_type, headers, is_streaming)


def _check_header(name: str, value: str) -> None:
    if not HEADER_NAME.fullmatch(name):
        raise ValueError(f"an Output's property must have a header's name, given {name!r}")

    if not HEADER_VALUE.fullmatch(value):
        raise ValueError(
            f"an Output's property {name} must be one line of Latin-1 characters, given {value!r}"
        )


def read_pieces(output: Output) -> Iterator[bytes]:
    """Yield the body, piece by piece if it is a stream."""
    if _status(output.code) in WITHOUT_BODY:
        return

    if output.stream_content is None:
        data = output.content.get()
        if data is not None:
            yield data

        return

    write = output.stream_formatter or (lambda piece: piece)
    pieces = output.stream_content
    for piece in synchronous(pieces) if isinstance(pieces, AsyncIterable) else pieces:
        yield as_bytes(write(piece))


def _status(code: Any) -> int:
    with suppress(TypeError, ValueError):
        if 200 <= int(code) <= 599:
            return int(code)

    raise ValueError(f"an Output's code must be an HTTP status from 200 to 599, given {code!r}")


def as_bytes(value: Any) -> bytes:
    """Return bytes as they are, str in UTF-8, and any other value as JSON."""
    if value is None:
        return b""

    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)

    if isinstance(value, str):
        return str(value).encode()

    to_json = getattr(value, "model_dump_json", None)
    text = to_json() if callable(to_json) else json.dumps(value, ensure_ascii=False)
    return str(text).encode()
