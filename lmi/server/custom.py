"""Where a model's own code meets a request: the formatters around a model, and `handle` in place of one.

The code runs in other processes (`lmi/custom/`); here its calls are made and what they bring is written. A Delta
crosses to it only where an output formatter is set and the request names no other form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from urllib.parse import parse_qsl

from lmi.config import Config
from lmi.custom.client import Call, CustomCodeFailed
from lmi.custom.messages import Feed, Head, Open, Piece, ReadInput
from lmi.dialects import Dialect
from lmi.errors import MalformedRequest, Unsupported
from lmi.formatters.base import Formatter
from lmi.schemas.common import Message, Parsed
from lmi.server.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.server.service import Service
from lmi.types import Delta, GenerationRequest

JSON = "application/json"


def properties(exchange: Exchange) -> dict[str, str]:
    """Headers under the names that clients write, and each `name=value` of the custom attributes, as the reference."""
    given = {name.title(): value for name, value in exchange.headers.items()}
    pairs = (part.partition("=") for part in exchange.headers.get(CUSTOM_ATTRIBUTES, "").split(";"))
    return given | {name.strip(): value.strip() for name, equals, value in pairs if equals}


def query(exchange: Exchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))


async def read_input(exchange: Exchange, service: Service, dialect: Dialect, body: bytes) -> tuple[bytes, str | None]:
    """The body and its content type, as the model's input formatter makes them if there is one.

    Raises MalformedRequest with what the formatter raised.
    """
    code = service.config.code
    if service.code is None or code is None or not (code.has_input_formatter and dialect.is_customisable):
        return body, exchange.headers.get("content-type")
    given = properties(exchange)
    async with exchange.deadline(service.config.server.predict_timeout_s):
        with (
            service.admitted(),
            closing(await service.code.begin(lambda call_id: ReadInput(call_id, given, body))) as call,
        ):
            try:
                return b"".join([piece.data async for piece in pieces(call)]), JSON
            except CustomCodeFailed as error:
                raise MalformedRequest(f"the input formatter failed: {error}") from None


def choose_formatter(
    service: Service, dialect: Dialect, message: Message, parsed: Parsed
) -> tuple[Formatter | CustomFormatter, Parsed]:
    """The writer of the answer, and the request as that needs it."""
    if not (dialect.is_customisable and has_output_formatter(service.config, message)):
        return dialect.formatter(parsed), parsed
    formatter = CustomFormatter(service, parsed, message.fields.get("parameters") or {})
    return formatter, replace(parsed, requests=formatter.requests)


def has_output_formatter(config: Config, message: Message) -> bool:
    """Whether the model's own formatter writes the answer: a request that names a form gets that."""
    if config.code is None or not config.code.has_output_formatter or config.model.output_formatter is not None:
        return False
    return not (message.fields.get("parameters") or {}).get("output_formatter")


class CustomFormatter:
    """The model's own output formatter, for one request. Its answers have no content type, as in the reference."""

    media_type = ""

    def __init__(self, service: Service, parsed: Parsed, parameters: dict[str, object]) -> None:
        request: GenerationRequest = parsed.request
        if request.num_sequences > 1:
            name = next(name for name in ("n", "best_of") if parameters.get(name) not in (None, 1))
            raise Unsupported(f"parameters.{name}", "the model's own output formatter writes one sequence")
        self.is_streaming = request.is_streaming
        self.requests = (replace(request, needs_log_probs=True),)
        self._workers = service.code
        self._open: Callable[[int], Open] = lambda call_id: Open(call_id, request.prompt, parameters)

    async def records(self, deltas: AsyncIterator[Delta], count: Callable[[Delta], None]) -> AsyncGenerator[bytes]:
        """What the formatter writes for each Delta."""
        assert self._workers is not None
        with closing(await self._workers.begin(self._open)) as call:
            async for delta in deltas:
                count(delta)
                tokens = [(token.id, token.text, token.log_prob, token.is_special) for token in delta.tokens]
                call.send(Feed(call.id, tokens, delta.finish_reason))
                piece = await call.take()
                assert isinstance(piece, Piece)
                yield piece.data


async def pieces(call: Call) -> AsyncGenerator[Piece]:
    """Those of a call that is answered whole, without its head."""
    while (message := await call.take()) is not None:
        if not isinstance(message, Head):
            yield message
