"""From a parsed request to the bytes of its answer.

The response's head is held back until the first Delta or error exists, so that an early failure has a real status.
After the first byte an error is written in the answer's own form and the body ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from lmi.dialects import Dialect
from lmi.errors import ClientGone, DeadlineExceeded, EngineLost, LmiError
from lmi.formatters.base import Formatter
from lmi.server.exchange import Exchange
from lmi.server.service import Service
from lmi.types import Delta, GenerationRequest


async def answer(exchange: Exchange, service: Service, dialect: Dialect) -> None:
    """Read one inference request and answer it, by whatever end it comes to."""
    frame = dialect.default_frame(service.config.model)
    try:
        with service.admitted():
            body = await exchange.body(service.config.server.max_request_size)
            message = dialect.read(body, exchange.headers.get("content-type"), service.config.model)
            frame = message.frame
            parsed = dialect.parse(message)
            service.report_tolerated(parsed.tolerated, exchange.request_id)
            await respond(exchange, service, dialect, parsed.request)
    except ClientGone:
        raise
    except LmiError as error:
        rendered = dialect.render_error(error, frame, accepted=isinstance(error, EngineLost))
        exchange.error_label = error.label
        await exchange.answer(rendered.status, rendered.media_type, rendered.body, rendered.headers.items())


async def respond(exchange: Exchange, service: Service, dialect: Dialect, request: GenerationRequest) -> None:
    """Generate and answer. Raises LmiError as long as no byte was sent; later only ClientGone."""
    formatter = dialect.formatter(request)
    deltas = metered(exchange, service, service.pipeline.generate(request))
    async with exchange.watched(), aclosing(deltas):
        try:
            async with deadline(service.config.server.predict_timeout_s):
                body = await write(exchange, formatter, deltas)
        except LmiError as error:
            if not exchange.status:
                raise
            exchange.error_label = error.label
            await exchange.write(dialect.render_error(error, request.frame, accepted=True).body)
        if exchange.status:
            await exchange.end()
        else:
            await exchange.answer(200, formatter.media_type, body)


async def write(exchange: Exchange, formatter: Formatter, deltas: AsyncIterator[Delta]) -> bytes:
    """Send a streaming formatter's records as they come; return the last one, of any other formatter the body."""
    record = b""
    async for delta in deltas:
        for record in formatter.feed(delta):
            if formatter.is_streaming:
                if not exchange.status:
                    await exchange.start(200, formatter.media_type, [("cache-control", "no-cache")])
                await exchange.write(record)
    return record


async def metered(exchange: Exchange, service: Service, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """The same Deltas, counted: tokens, time to the first, time between them, reason of the end."""
    record = service.record
    inter_token_latency_s = record.inter_token_latency_s
    last_s = 0.0
    outcome = "cancelled"
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                now_s = time.monotonic()
                num_tokens = len(delta.tokens)
                if last_s:
                    inter_token_latency_s.observe((now_s - last_s) / max(1, num_tokens), num_tokens)
                else:
                    record.time_to_first_token_s.observe(now_s - exchange.started_s)
                last_s = now_s
                record.num_prompt_tokens += delta.num_prompt_tokens
                record.num_generated_tokens += num_tokens
                outcome = delta.finish_reason or outcome
                yield delta
    except LmiError:
        outcome = "error"
        raise
    finally:
        record.num_finished.add(outcome)


@asynccontextmanager
async def deadline(timeout_s: float | None) -> AsyncIterator[None]:
    """Raise DeadlineExceeded in what runs inside once `timeout_s` is over; None waits for ever."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"no answer within predict_timeout ({timeout_s:g} s)") from None
