"""Turns the result of a handler into the head and the pieces of an HTTP response."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from lmi.user_code.answer import as_bytes
from lmi.user_code.signatures import synchronous

if TYPE_CHECKING:
    from djl_python import Output

NOT_HEADERS = frozenset("content-type content-length transfer-encoding connection x-request-id".split())
HEADER_NAME, HEADER_VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\t -~\x80-\xff]*")
WITHOUT_BODY = (204, 205, 304)


class ResponseHead(NamedTuple):
    """Status and headers. `media_type` is "" if there is no body."""

    status: int
    media_type: str
    headers: dict[str, str]
    is_streaming: bool = False


def read_results(result: Any) -> Generator[object]:
    """Yield a handler's result, or each item of its generator. An item is finalized after it was used."""
    if hasattr(result, "__aiter__"):
        result = synchronous(result)
    elif not isinstance(result, Generator):
        result = (item for item in (result,) if item is not None)
    with closing(result) as items:
        for item in items:
            try:
                yield item
            finally:
                if (finalize := getattr(item, "finalizer", None)) is not None:
                    finalize()
            if getattr(item, "is_last", False):
                return


def check_output(result: object, handler_name: str) -> Output:
    """Return the result if it is an Output. Raises TypeError if it is not."""
    from djl_python import Output

    if not isinstance(result, Output):
        raise TypeError(f"{handler_name} must return an Output or None, not {type(result).__name__}")
    return result


def read_head(output: Output, *, is_streaming: bool) -> ResponseHead:
    """Return the head of an Output's response. Raises ValueError for values that HTTP cannot carry."""
    headers = {str(name): str(value) for name, value in output.properties.items()}
    given = next((value for name, value in headers.items() if name.lower() == "content-type"), None)
    status = _status(output.code)
    is_streaming = (is_streaming or output.stream_content is not None) and status not in WITHOUT_BODY
    has_body = is_streaming or not output.content.is_empty()
    media_type = given or output.media_type or ("application/octet-stream" if has_body else "")
    others = {name: value for name, value in headers.items() if name.lower() not in NOT_HEADERS}
    for name, value in [("content-type", media_type), *others.items()]:  # RFC 9110, sections 5.1 and 5.5
        if not HEADER_NAME.fullmatch(name):
            raise ValueError(f"an Output's property must have a header's name, given {name!r}")
        if not HEADER_VALUE.fullmatch(value):
            raise ValueError(f"an Output's property {name} must be one line of Latin-1 characters, given {value!r}")
    return ResponseHead(status, media_type, others, is_streaming)


def read_pieces(output: Output) -> Iterator[bytes]:
    """Yield the body, piece by piece if it is a stream."""
    if _status(output.code) in WITHOUT_BODY:
        return
    if output.stream_content is None:
        if (data := output.content.get()) is not None:
            yield data
        return
    write = output.stream_formatter or (lambda item: item)
    items = output.stream_content
    for item in synchronous(items) if isinstance(items, AsyncIterable) else items:
        yield as_bytes(write(item))


def _status(code: Any) -> int:
    with suppress(TypeError, ValueError):
        if 200 <= int(code) <= 599:
            return int(code)
    raise ValueError(f"an Output's code must be an HTTP status from 200 to 599, given {code!r}")
