"""Outputs of asynchronous handlers: a whole answer, and the pieces of a streamed answer."""

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
    """Make a whole answer in JSON. `properties` become headers.

    An `error` replaces the data, and `code` is its status (424).
    """
    output = _output(data, JSON, True, error, code)
    output.properties.update(properties or {})
    return output


def create_stream_chunk_output(
    data: str | Mapping[str, Any],
    last_chunk: bool,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """Make one line of a streamed answer."""
    return _output(data, JSONLINES, last_chunk, error, code)


async def handle_streaming_response(
    response: AsyncIterator[Any],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **keywords: Any,
) -> AsyncIterator[Output]:
    """Yield an Output for each chunk, until the formatter reports that one is the last.

    The formatter gets the chunk, and returns the data to send and whether it is the last. With
    `accumulate_chunks` it also gets a `history` and returns it as the third value. An exception in
    it ends the answer.
    """
    history: list[Any] = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, is_last, history = stream_output_formatter(chunk, history=history, **keywords)
            else:
                data, is_last = stream_output_formatter(chunk, **keywords)
        except Exception as error:
            log.exception("the formatter of a stream failed")
            yield create_stream_chunk_output("", True, error=str(error), code=424)
            return

        yield create_stream_chunk_output(data, is_last)
        if is_last:
            return


def _output(
    data: str | Mapping[str, Any],
    media_type: str,
    is_last: bool,
    error: str | None,
    code: int | None,
) -> Output:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    fields = {
        "data": text + "\n",
        "last": is_last,
        "error": error,
        "code": code,
    }
    record = Output.binary_encode(fields)
    return Output().add_property("Content-Type", media_type).add(record)
