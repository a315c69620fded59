"""One inference request, from its body to the bytes of its answer.

The response's head is held back until the first Delta or error exists, so that an early failure has a real status.
After the first byte an error is written in the format of the answer, and the body ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from lmi.apis import AnyApi
from lmi.errors import ClientGone, LmiError
from lmi.formatters.base import AsyncFormatter
from lmi.http.exchange import Exchange
from lmi.schemas.common import Message, Parsed
from lmi.server.service import Service
from lmi.server.user_code import UserFormatters
from lmi.settings.config import ModelConfig
from lmi.shared.state import FrontEndRecord
from lmi.types import AnswerFormat, Delta


async def serve_request(
    exchange: Exchange,
    service: Service,
    api: AnyApi,
    model: ModelConfig | None = None,
    choose: Callable[[bytes], AnyApi] | None = None,
) -> None:
    """Read one inference request and answer it, with an error if it fails.

    `model` has the name that the path has for it. `choose` finds the API in the body, if a path serves several. Until
    the body is read the API is `api`.
    """
    await Inference(exchange, service, api, model or service.model).answer(choose)


class Inference:
    """Answers one inference request: reads the body, parses it, takes a place in the queue and generates.

    The API is that of the path until the body has chosen one. The format of the answer is None until the body is read.
    """

    def __init__(self, exchange: Exchange, service: Service, api: AnyApi, model: ModelConfig) -> None:
        self._exchange, self._service = exchange, service
        self._api, self._model = api, model
        self._format: AnswerFormat | None = None
        self._formatters = UserFormatters(exchange, service)

    async def answer(self, choose: Callable[[bytes], AnyApi] | None) -> None:
        try:
            message = await self._read(choose)
            parsed = self._parse(message)
            with self._service.front_end.admitted(parsed.num_sequences):
                formatter, parsed = self._formatters.choose(self._api, message, parsed)
                await self._exchange.run_while_there(
                    stream_answer(self._exchange, self._service, self._api, parsed, formatter)
                )
        except ClientGone:
            raise
        except LmiError as error:
            await self._refuse(error)
        finally:
            self._formatters.close()

    async def _read(self, choose: Callable[[bytes], AnyApi] | None) -> Message[Any]:
        """Read and decode the body. After this, errors have the format of the answer."""
        exchange, service = self._exchange, self._service
        service.front_end.check_room()  # before the body: a full server reads nothing
        if not self._formatters.reads(self._api):
            exchange.check_is_whole()
        body = await exchange.body(service.config.server.max_request_size, service.front_end.body_memory)
        body, content_type = await self._formatters.read(self._api, body)
        if choose is not None:
            self._api = choose(body)
        message = self._api.read(body, content_type, self._model)
        self._format = message.format
        return message

    def _parse(self, message: Message[Any]) -> Parsed[Any]:
        """Check the requests, and log the names that they ignore."""
        parsed = self._api.parse(self._formatters.asked(self._api, message))
        self._format = parsed.format
        self._service.front_end.report_ignored(parsed.ignored, self._exchange.request_id)
        self._service.check_sequences(parsed.requests)
        return parsed

    async def _refuse(self, error: LmiError) -> None:
        api, exchange = self._api, self._exchange
        rendered = api.render_error(error, self._format or api.default_format(self._model), accepted=False)
        exchange.error_label = error.label
        body = api.whole(rendered.media_type, rendered.body)
        await exchange.send_whole(rendered.status, rendered.media_type, body, rendered.headers.items())


async def stream_answer(
    exchange: Exchange,
    service: Service,
    api: AnyApi,
    parsed: Parsed[Any],
    formatter: AsyncFormatter,
) -> None:
    """Generate and send the answer. Raises LmiError only before the first byte."""
    assert service.pipeline is not None
    meter = Meter(service.record, exchange.started_s, is_streaming=formatter.is_streaming)
    try:
        with meter:
            async with (
                exchange.deadline(service.config.server.predict_timeout_s),
                aclosing(service.pipeline.generate(parsed.requests)) as deltas,
                aclosing(meter.counted(deltas)) as counted,
                aclosing(formatter.records(counted)) as records,
            ):
                body = await write(exchange, formatter, records)
    except LmiError as error:  # the engine is already free, even if the client reads the rest slowly
        if not exchange.status:
            raise
        exchange.error_label = error.label
        await exchange.write(api.render_error(error, parsed.format, accepted=True).body)
    if exchange.status:
        await exchange.end()
    else:
        body = body if formatter.is_verbatim else api.whole(formatter.media_type, body)
        await exchange.send_whole(200, formatter.media_type, body)


async def write(exchange: Exchange, formatter: AsyncFormatter, records: AsyncIterator[bytes]) -> bytes:
    """Send the records of a stream as they arrive. Returns the body of an answer that is not streamed."""
    body = []
    async for record in records:
        if not formatter.is_streaming:
            body.append(record)
            continue
        if not exchange.status:
            await exchange.start(200, formatter.media_type, [("cache-control", "no-cache")])
        if record:
            await exchange.write(record)
    return b"".join(body)


class Meter:
    """Counts one answer while it is generated: tokens, time to the first, time between tokens, and the finish reason.

    The tokens of an answer that is not streamed are not timed. The Meter runs for every token, so it uses views and
    plain numbers, and writes the totals when the answer ends.
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

    async def counted(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
        """Pass the deltas on and count each."""
        async for delta in deltas:
            self.count(delta)
            yield delta

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
