"""Formatters of a response that user code writes. They send it each Delta and return what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from lmi.apis.base.api import AnyApi
from lmi.apis.base.formatter import AsyncFormatter
from lmi.apis.base.readers import Message, Parsed
from lmi.apis.lmi.schema import name_of_several
from lmi.errors import Unsupported
from lmi.types import Delta, Token
from lmi.user_code.client import Call, UserCodeWorkers
from lmi.user_code.messages import Feed, Head, Open, Respond, TokenFields

JSON, JSONLINES = "application/json", "application/jsonlines"
EVENT = b"data: "


class OutputFormatter(AsyncFormatter):
    """Writes the response to one prompt. The content type is the one that the process of user code names, if any."""

    media_type = ""
    is_verbatim = True

    def __init__(self, workers: UserCodeWorkers, call: Call | None, message: Message[Any], parsed: Parsed[Any]) -> None:
        """`call` is the one in which the input formatter ran, if there is one."""
        if parsed.requests[0].num_sequences > 1:
            name = name_of_several(message.fields["parameters"])
            raise Unsupported(name, "the model's own output formatter writes one sequence")
        self.is_streaming = parsed.requests[0].is_streaming
        self._workers, self._call = workers, call
        self._open = open_message(message, parsed)
        self._has_head = False

    async def begin(self) -> None:
        if self._call is None:
            self._call = await self._workers.begin(self._open)
        else:
            self._call.send(self._open(self._call.id))

    async def feed(self, delta: Delta) -> list[bytes]:
        return [await self._written(delta)]

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    async def _written(self, delta: Delta) -> bytes:
        """Return what the code writes for a Delta."""
        assert self._call is not None
        self._call.send(feed(self._call.id, delta))
        if not self._has_head:
            self._take_head(await self._call.head())
            self._has_head = True
        return await self._call.chunk()

    def _take_head(self, head: Head) -> None:
        self.media_type = head.media_type


class ListOutputFormatter(OutputFormatter):
    """Writes the response to a list of prompts: a JSON list of what the code writes for each, a JSON value or a string.

    A stream has lines like `{"outputs": ["what was written", ""]}`.
    """

    def __init__(self, workers: UserCodeWorkers, call: Call | None, message: Message[Any], parsed: Parsed[Any]) -> None:
        super().__init__(workers, call, message, parsed)
        self._unsent = [b""] * len(parsed.requests)
        self._num_open = len(parsed.requests)

    async def feed(self, delta: Delta) -> list[bytes]:
        self._unsent[delta.index] += await self._written(delta)
        self._num_open -= delta.finish_reason is not None
        if not self.is_streaming:
            return [] if self._num_open else [b"[%b]\n" % b", ".join(map(as_json, self._unsent))]
        if delta.is_followed or not any(self._unsent):
            return []
        written, self._unsent = self._unsent, [b""] * len(self._unsent)
        return [orjson.dumps({"outputs": [each.decode(errors="replace") for each in written]}) + b"\n"]

    def _take_head(self, head: Head) -> None:
        self.media_type = JSONLINES if self.is_streaming else JSON


class ResponseFormatter(AsyncFormatter):
    """Writes the response of an OpenAI API, each object of which the user's output formatter rewrites."""

    is_verbatim = True

    def __init__(self, workers: UserCodeWorkers, call: Call | None, api: AnyApi, parsed: Parsed[Any]) -> None:
        self._formatter = api.formatter(parsed)
        self.media_type, self.is_streaming = self._formatter.media_type, self._formatter.is_streaming
        self._workers, self._call, self._api = workers, call, api

    async def feed(self, delta: Delta) -> list[bytes]:
        records = [self._api.whole(self.media_type, record) for record in self._formatter.feed(delta)]
        return [
            b"".join([await self._rewritten(line) for line in record.splitlines(keepends=True)]) for record in records
        ]

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    async def _rewritten(self, line: bytes) -> bytes:
        """Return the line with its object rewritten by the code. A line without an object stays as it is."""
        prefix, body = (EVENT, line.removeprefix(EVENT)) if line.startswith(EVENT) else (b"", line)
        if not body.startswith(b"{"):
            return line
        if self._call is None:
            self._call = await self._workers.begin(lambda call_id: Respond(call_id, body))
        else:
            self._call.send(Respond(self._call.id, body))
        written = await self._call.chunk()
        return event_lines(written) if prefix else written


def open_message(message: Message[Any], parsed: Parsed[Any]) -> Callable[[int], Open]:
    """Return a function that makes the message to open a call's answers from the call's id."""
    request = parsed.requests[0]
    return lambda call_id: Open(
        call_id,
        [each.prompt for each in parsed.requests],
        {name: value for name, value in message.fields.items() if name != "inputs"},
        request.is_streaming,
        details=message.format.details,
        return_full_text=request.return_full_text,
    )


def feed(call_id: int, delta: Delta) -> Feed:
    has_top = any(token.top is not None for token in delta.tokens)
    return Feed(
        call_id,
        delta.index,
        token_fields(delta.tokens),
        delta.finish_reason,
        delta.stop_reason,
        top_tokens=[token_fields(token.top or ()) for token in delta.tokens] if has_top else None,
        prompt_token_ids=None if delta.prompt_token_ids is None else list(delta.prompt_token_ids),
        prefill=None if delta.prefill is None else token_fields(delta.prefill),
    )


def token_fields(tokens: Sequence[Token]) -> list[TokenFields]:
    return [(token.id, token.text, token.log_prob, token.is_special) for token in tokens]


def event_lines(written: bytes) -> bytes:
    """Return each line as the data of a server-sent event, unless it is already one."""
    lines = written.splitlines()
    return b"".join((line if line.startswith(EVENT) else EVENT + line) + b"\n" for line in lines)


def as_json(written: bytes) -> bytes:
    """Return what was written if it is JSON, else a JSON string of it."""
    try:
        orjson.loads(written)
    except orjson.JSONDecodeError:
        return orjson.dumps(written.decode(errors="replace"))
    return written.strip()
