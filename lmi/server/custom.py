"""Where a model's own code meets a request: the formatters around a model, and `handle` in place of one.

The code runs in other processes (`lmi/custom/`); here its calls are made and what they bring is written. A Delta
crosses to it only where an output formatter is set and the request names no other form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import orjson

from lmi.apis import AnyApi
from lmi.errors import MalformedRequest, Unsupported
from lmi.formatters.base import Formatter
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.schemas.common import Message, Parsed
from lmi.server.service import Service
from lmi.settings.config import Config
from lmi.types import Delta, Token
from lmi.user_code.client import Call, CodeWorkers, CustomCodeFailed
from lmi.user_code.messages import Feed, Head, Open, Piece, ReadInput, Respond, TokenFields

JSON, JSONLINES = "application/json", "application/jsonlines"
EVENT = b"data: "


def properties(exchange: Exchange) -> dict[str, str]:
    """Headers under the names that clients write, and each `name=value` of the custom attributes, as the reference."""
    given = {name.title(): value for name, value in exchange.headers.items()}
    pairs = (part.partition("=") for part in exchange.headers.get(CUSTOM_ATTRIBUTES, "").split(";"))
    return given | {name.strip(): value.strip() for name, equals, value in pairs if equals}


def query(exchange: Exchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))


class OwnFormatters:
    """The model's own formatters around one request, as far as there are any. Always `close` it.

    Both work in one call, so that the output formatter finds the object that the input formatter has made.
    """

    def __init__(self, exchange: Exchange, service: Service) -> None:
        self._exchange = exchange
        self._service = service
        self._call: Call | None = None
        self._is_any_form_ours = False  # the path has no form of its own, so that formatters meet OpenAI's bodies too

    def reads(self, api: AnyApi) -> bool:
        """Whether the input formatter gets the bodies of this API."""
        code = self._service.config.code
        return code is not None and code.has_input_formatter and api.is_customisable

    async def read(self, api: AnyApi, body: bytes) -> tuple[bytes, str | None]:
        """The body and its content type, as the input formatter makes them if there is one.

        Raises MalformedRequest with what the formatter raised.
        """
        service, exchange = self._service, self._exchange
        self._is_any_form_ours = api.is_customisable
        if service.code is None or not self.reads(api):
            return body, exchange.headers.get("content-type")
        given = properties(exchange)
        async with exchange.deadline(service.config.server.predict_timeout_s):
            with service.admitted():
                self._call = await service.code.begin(lambda call_id: ReadInput(call_id, given, body))
                try:
                    piece = await self._call.take()
                except CustomCodeFailed as error:
                    raise MalformedRequest(f"the input formatter failed: {error}") from None
        assert isinstance(piece, Piece)
        return piece.data, JSON

    def asked(self, api: AnyApi, message: Message[Any]) -> Message[Any]:
        """The message as it is to be parsed: an output formatter sees the details whether the client asks or not."""
        if self._service.config.model.dynamic_batch or not self._writes(api, message):
            return message
        parameters = message.fields.get("parameters") or {}
        if parameters.get("details") not in (None, False):
            return message
        return replace(message, fields=message.fields | {"parameters": parameters | {"details": True}})

    def choose(
        self, api: AnyApi, message: Message[Any], parsed: Parsed[Any]
    ) -> tuple[Formatter[Any] | OwnWriter, Parsed[Any]]:
        """The writer of the answer, and the request as that needs it. `message`: as the client sent it."""
        if not self._is_any_form_ours or not has_output_formatter(self._service.config, message):
            self.close()
            return api.formatter(parsed), parsed
        assert self._service.code is not None
        if not api.is_customisable:
            return ResponseFormatter(self._service.code, self._call, api, parsed), parsed
        formatter = CustomFormatter(self._service.code, self._call, message, parsed)
        requests = tuple(replace(request, needs_log_probs=True) for request in parsed.requests)
        return formatter, replace(parsed, requests=requests)

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    def _writes(self, api: AnyApi, message: Message[Any]) -> bool:
        return api.is_customisable and has_output_formatter(self._service.config, message)


def has_output_formatter(config: Config, message: Message[Any]) -> bool:
    """Whether the model's own formatter writes the answer: a request that names a form gets that."""
    if config.code is None or not config.code.has_output_formatter or config.model.output_formatter is not None:
        return False
    parameters = message.fields.get("parameters")  # of OpenAI's bodies it may be anything
    named = parameters.get("output_formatter") if isinstance(parameters, dict) else None
    return not (named or ("inputs" not in message.fields and message.fields.get("output_formatter")))


class CustomFormatter:
    """The model's own output formatter, for the answers to one body. What it writes says the content type.

    A list of inputs (with a dynamic batch) gives a JSON list of what is written for each, a value where that is JSON
    and else a string; streamed, lines like `{"outputs": ["what is written", ""]}`.
    """

    media_type = ""

    def __init__(self, workers: CodeWorkers, call: Call | None, message: Message[Any], parsed: Parsed[Any]) -> None:
        request = parsed.requests[0]
        parameters = message.fields.get("parameters") or {}
        if request.num_sequences > 1:
            name = next(name for name in ("n", "best_of") if parameters.get(name) not in (None, 1))
            raise Unsupported(f"parameters.{name}", "the model's own output formatter writes one sequence")
        self.is_streaming = request.is_streaming
        self._is_list = isinstance(message.fields["inputs"], list)
        self._workers, self._call = workers, call
        self._open: Callable[[int], Open] = lambda call_id: Open(
            call_id,
            [each.prompt for each in parsed.requests],
            {name: value for name, value in message.fields.items() if name != "inputs"},
            request.is_streaming,
            details=message.format.details,
            return_full_text=request.return_full_text,
        )
        self._written = [b""] * len(parsed.requests)  # and not sent yet, for each input

    async def records(self, deltas: AsyncIterator[Delta], count: Callable[[Delta], None]) -> AsyncGenerator[bytes]:
        """What the formatter writes for each Delta; of a list that is not streamed all at the end."""
        with closing(await self._begin()) as call:
            head: Head | Piece | None = None
            async for delta in deltas:
                count(delta)
                call.send(feed(call.id, delta))
                if head is None:
                    head = await call.take()
                    assert isinstance(head, Head)
                    self._set_type(head)
                piece = await call.take()
                assert isinstance(piece, Piece)
                if not self._is_list:
                    yield piece.data
                    continue
                self._written[delta.index] += piece.data
                if self.is_streaming and any(self._written) and not delta.is_followed:
                    yield outputs_line(self._written)
                    self._written = [b""] * len(self._written)
        if self._is_list and not self.is_streaming:
            yield b"[%b]\n" % b", ".join(map(as_json, self._written))

    async def _begin(self) -> Call:
        if self._call is None:
            return await self._workers.begin(self._open)
        self._call.send(self._open(self._call.id))
        return self._call

    def _set_type(self, head: Head) -> None:
        if not self._is_list:
            self.media_type = head.media_type
        else:
            self.media_type = JSONLINES if self.is_streaming else JSON


class ResponseFormatter:
    """The model's own output formatter behind one of OpenAI's: it is given each object that would be sent."""

    def __init__(self, workers: CodeWorkers, call: Call | None, api: AnyApi, parsed: Parsed[Any]) -> None:
        self._formatter = api.formatter(parsed)
        self.media_type, self.is_streaming = self._formatter.media_type, self._formatter.is_streaming
        self._workers, self._call, self._api = workers, call, api

    async def records(self, deltas: AsyncIterator[Delta], count: Callable[[Delta], None]) -> AsyncGenerator[bytes]:
        try:
            async for delta in deltas:
                count(delta)
                for record in self._formatter.feed(delta):
                    lines = self._api.whole(self.media_type, record).splitlines(keepends=True)
                    yield b"".join([await self._written(line) for line in lines])
        finally:
            if self._call is not None:
                self._call.close()

    async def _written(self, line: bytes) -> bytes:
        """A line with an object in it as the code writes that, any other as it is."""
        prefix, body = (EVENT, line.removeprefix(EVENT)) if line.startswith(EVENT) else (b"", line)
        if not body.startswith(b"{"):
            return line
        if self._call is None:
            self._call = await self._workers.begin(lambda call_id: Respond(call_id, body))
        else:
            self._call.send(Respond(self._call.id, body))
        piece = await self._call.take()
        assert isinstance(piece, Piece)
        return event_lines(piece.data) if prefix else piece.data


OwnWriter = CustomFormatter | ResponseFormatter


def event_lines(written: bytes) -> bytes:
    """As the data of a server-sent event, where it is not written as one already."""
    lines = written.splitlines()
    return b"".join((line if line.startswith(EVENT) else EVENT + line) + b"\n" for line in lines)


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


def as_json(written: bytes) -> bytes:
    """A value where it is one, else a string."""
    try:
        orjson.loads(written)
    except orjson.JSONDecodeError:
        return orjson.dumps(written.decode(errors="replace"))
    return written.strip()


def outputs_line(written: Sequence[bytes]) -> bytes:
    return orjson.dumps({"outputs": [each.decode(errors="replace") for each in written]}) + b"\n"


async def pieces(call: Call) -> AsyncGenerator[Piece]:
    """Those of a call that is answered whole, without its head."""
    while (message := await call.take()) is not None:
        if not isinstance(message, Head):
            yield message
