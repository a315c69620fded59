"""From a parsed request to the bytes of its answer.

The response's head is held back until the first Delta or error exists, so that an early failure has a real status.
After the first byte an error is written in the answer's own form and the body ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self

from lmi.dialects import Dialect
from lmi.errors import ClientGone, LmiError
from lmi.formatters.base import Formatter
from lmi.http.exchange import Exchange
from lmi.schemas.common import Parsed
from lmi.server.custom import OwnFormatters, OwnWriter
from lmi.server.service import Service
from lmi.settings.config import ModelConfig
from lmi.shared.state import FrontEndRecord
from lmi.types import Delta, Frame


async def answer(
    exchange: Exchange,
    service: Service,
    dialect: Dialect,
    model: ModelConfig | None = None,
    choose: Callable[[bytes], Dialect] | None = None,
) -> None:
    """Read one inference request and answer it, by whatever end it comes to.

    `model`: as the path names it. `choose`: the door by what its body holds, where a path belongs to several; until
    that is read it is `dialect`.
    """
    model = model or service.model
    frame = dialect.default_frame(model)
    own = OwnFormatters(exchange, service)
    try:
        service.check_room()  # before the body: a full server reads nothing
        if not own.reads(dialect):
            exchange.check_is_whole()
        body = await exchange.body(service.config.server.max_request_size, service.body_memory)
        body, content_type = await own.read(dialect, body)
        if choose is not None:
            dialect = choose(body)
            frame = dialect.default_frame(model)
        message = dialect.read(body, content_type, model)
        frame = message.frame
        parsed = dialect.parse(own.asked(dialect, message))
        del body
        frame = replace(frame, field_names=parsed.field_names)
        service.report_tolerated(parsed.tolerated, exchange.request_id)
        service.check_sequences(parsed.requests)
        with service.admitted(sum(request.num_sequences for request in parsed.requests)):
            formatter, parsed = own.choose(dialect, message, parsed)
            await exchange.run_while_there(respond(exchange, service, dialect, parsed, frame, formatter))
    except ClientGone:
        raise
    except LmiError as error:
        rendered = dialect.render_error(error, frame, accepted=False)
        exchange.error_label = error.label
        body = dialect.whole(rendered.media_type, rendered.body)
        await exchange.answer(rendered.status, rendered.media_type, body, rendered.headers.items())
    finally:
        own.close()


async def respond(
    exchange: Exchange,
    service: Service,
    dialect: Dialect,
    parsed: Parsed,
    frame: Frame,
    formatter: Formatter | OwnWriter,
) -> None:
    """Generate and answer. Raises LmiError as long as no byte was sent; later none."""
    meter = Meter(service.record, exchange.started_s, is_streaming=formatter.is_streaming)
    try:
        with meter:
            async with (
                exchange.deadline(service.config.server.predict_timeout_s),
                aclosing(service.pipeline.generate(parsed.requests)) as deltas,
            ):
                if isinstance(formatter, Formatter):
                    body = dialect.whole(formatter.media_type, await write(exchange, formatter, deltas, meter))
                else:
                    body = await write_custom(exchange, formatter, deltas, meter)
    except LmiError as error:  # the engine is free by now, however slowly the client reads the rest
        if not exchange.status:
            raise
        exchange.error_label = error.label
        await exchange.write(dialect.render_error(error, frame, accepted=True).body)
    if exchange.status:
        await exchange.end()
    else:
        await exchange.answer(200, formatter.media_type, body)


async def write(exchange: Exchange, formatter: Formatter, deltas: AsyncIterator[Delta], meter: Meter) -> bytes:
    """Send a streaming formatter's records as they come; return the last one, of any other formatter the body."""
    record = b""
    async for delta in deltas:
        meter.count(delta)
        for record in formatter.feed(delta):
            if formatter.is_streaming:
                if not exchange.status:
                    await exchange.start(200, formatter.media_type, [("cache-control", "no-cache")])
                await exchange.write(record)
    return record


async def write_custom(exchange: Exchange, formatter: OwnWriter, deltas: AsyncIterator[Delta], meter: Meter) -> bytes:
    """The same through the model's own formatter: what it writes for each Delta as it comes, or all of it at the end.

    An answer that it writes nothing of still begins, so that its status is told.
    """
    written = []
    async with aclosing(formatter.records(deltas, meter.count)) as records:
        async for record in records:
            if not formatter.is_streaming:
                written.append(record)
                continue
            if not exchange.status:
                await exchange.start(200, formatter.media_type, [("cache-control", "no-cache")])
            if record:
                await exchange.write(record)
    return b"".join(written)


class Meter:
    """Counts one answer as it comes: tokens, time to the first, time between them, and at the end the reason.

    An answer that comes whole says nothing of its tokens' times. Works on views and plain numbers, since it runs for
    every token; the totals are written when the answer ends.
    """

    def __init__(self, record: FrontEndRecord, started_s: float, *, is_streaming: bool) -> None:
        self._is_streaming = is_streaming
        self._record = record
        self._inter_token_latency_s = record.inter_token_latency_s
        self._last_s = started_s
        self._num_tokens = 0
        self._outcome = "cancelled"

    def __enter__(self) -> Self:
        return self

    def count(self, delta: Delta) -> None:
        num_tokens = len(delta.tokens)
        if self._is_streaming and num_tokens:
            now_s = time.monotonic()
            if self._num_tokens:
                self._inter_token_latency_s.observe((now_s - self._last_s) / num_tokens, num_tokens)
            else:
                self._record.time_to_first_token_s.observe(now_s - self._last_s)
            self._last_s = now_s
        self._num_tokens += num_tokens
        if delta.num_prompt_tokens:
            self._record.num_prompt_tokens += delta.num_prompt_tokens
        if delta.finish_reason is not None:
            self._outcome = delta.finish_reason

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record.num_generated_tokens += self._num_tokens
        self._record.num_finished.add("error" if isinstance(error, LmiError) else self._outcome)
