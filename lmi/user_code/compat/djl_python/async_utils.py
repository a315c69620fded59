"""Outputs of asynchronous handlers: a whole answer, and the pieces of a streamed answer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from djl_python.outputs import JSON, JSONLINES, Output

log = logging.getLogger(__name__)


def create_non_stream_output(
    data: str | Mapping[str, Any],
    properties: Mapping[str, Any] | None = None,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """A whole answer, JSON. `properties` become headers; an `error` is the answer instead, `code` its status (424)."""
    output = _output(data, JSON, True, error, code)
    for name, value in (properties or {}).items():
        output.add_property(name, value)
    return output


def create_stream_chunk_output(
    data: str | Mapping[str, Any], last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    """One line of a streamed answer."""
    return _output(data, JSONLINES, last_chunk, error, code)


async def handle_streaming_response(
    response: AsyncIterator[Any],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **named: Any,
) -> AsyncIterator[Output]:
    """An Output for each chunk, until the formatter says that one is the last.

    The formatter is called with the chunk and returns what to send and whether it is the last; with
    `accumulate_chunks` it is given a `history` too and returns that as the third. What it raises ends the answer.
    """
    history: list[Any] = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, is_last, history = stream_output_formatter(chunk, history=history, **named)
            else:
                data, is_last = stream_output_formatter(chunk, **named)
        except Exception as error:
            log.exception("the formatter of a stream failed")
            yield create_stream_chunk_output("", True, error=str(error), code=424)
            return
        yield create_stream_chunk_output(data, is_last)
        if is_last:
            return


def _output(
    data: str | Mapping[str, Any], media_type: str, is_last: bool, error: str | None, code: int | None
) -> Output:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    fields = {"data": text + "\n", "last": is_last, "error": error, "code": code}
    return Output().add_property("Content-Type", media_type).add(Output.binary_encode(fields))
