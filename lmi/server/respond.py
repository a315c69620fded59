"""One inference request, from its body to the bytes of its answer.

The response's head is held back until the first Delta or error exists, so that an early failure has a real status.
After the first byte an error is written in the format of the answer, and the body ends.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from typing import Any, Self

from lmi.adapters.choice import choose_adapter
from lmi.apis.base.api import AnyApi, Rendered
from lmi.apis.base.formatter import JSON, AsyncFormatter, Formatter
from lmi.apis.base.readers import Message, Parsed, is_text
from lmi.errors import ClientGone, LmiError
from lmi.executor import RequestPerfMetrics
from lmi.http.exchange import Exchange
from lmi.pipeline import comes_in_parts
from lmi.server.origin import client_of, client_priority, client_timeout_s
from lmi.server.service import Service
from lmi.server.streams import Body
from lmi.sessions.http import change_session, request_type, session_of
from lmi.settings.config import ModelConfig
from lmi.shared.state import FrontEndRecord
from lmi.types import AnswerFormat, Delta, GenerationRequest, Origin, OutputFormat
from lmi.user_code.formatter import UserFormatters

Choose = Callable[[bytes, str | None], AnyApi]
Send = Callable[[list[bytes]], Awaitable[None] | None]  # what it returns is awaited before the next records
IGNORED_STREAM = "stream: no effect in a body of lines, whose answers are whole"


async def serve_request(
    exchange: Exchange, service: Service, api: AnyApi, model: ModelConfig | None = None, choose: Choose | None = None
) -> None:
    """Read one inference request and answer it, with an error if it fails.

    `model` has the name that the path has for it. `choose` finds the API from the body and its content type, if a path
    serves several; only such a path opens and closes sessions. Until the body is read the API is `api`.
    """
    async with Inference(exchange, service, api, model) as inference:
        body = await inference.receive()
        asked = None if choose is None else inference.session_request(body)
        if asked is not None:
            await change_session(exchange, service, asked)
        else:
            await answer(inference, body, choose)


async def answer(inference: Inference, body: bytes, choose: Choose | None) -> None:
    """Answer a body that asks for generation. Raises LmiError only before the first byte."""
    exchange, service = inference.exchange, inference.service
    message = await inference.read(body, choose)
    inference.session = await session_of(exchange, service)
    parsed = await inference.parse(message)
    with service.admitted(parsed.num_places):
        formatter, parsed = inference.formatter(message, parsed)
        await exchange.run_while_there(stream_answer(inference, parsed, formatter))


class Inference:
    """One inference request: its API, and what it makes of a body, of an error and of the requests in it.

    The API is that of the path until the body has chosen one. The format of the answer is None until the body is read.
    With `is_line` it is a line of a body: its answer is not streamed, and the caller holds a place in the queue for it.
    An LmiError that leaves `async with` is the answer of the exchange.
    """

    def __init__(
        self,
        exchange: Exchange,
        service: Service,
        api: AnyApi,
        model: ModelConfig | None = None,
        *,
        is_line: bool = False,
    ) -> None:
        self.exchange, self.service = exchange, service
        self.api, self._model = api, model or service.model
        self.session: str | None = None  # the id of its session, if it names one
        self.started_s = exchange.started_s
        self._client_timeout_s = math.inf
        self._is_line = is_line
        self._format: AnswerFormat | None = None
        self._formatters = UserFormatters(exchange, service, is_admitted=is_line)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> bool:
        try:
            if not isinstance(error, LmiError) or isinstance(error, ClientGone):
                return False
            await self.refuse(error)
            return True
        finally:
            self.close()

    def of_line(self) -> Inference:
        """The next line of this body."""
        line = Inference(self.exchange, self.service, self.api, self._model, is_line=True)
        line.session, line.started_s = self.session, time.monotonic()
        line._client_timeout_s = self._client_timeout_s
        return line

    async def receive(self) -> bytes:
        """Return the body of the HTTP request."""
        exchange, service = self.exchange, self.service
        service.check_room()  # before the body: a full server reads nothing
        self._client_timeout_s = client_timeout_s(exchange)
        if not self._formatters.reads(self.api):
            exchange.check_is_whole()
        return await exchange.body(service.config.server.max_request_size, service.front_end.body_memory)

    def session_request(self, body: bytes) -> str | None:
        """Return what the body asks of sessions, None if it asks for an answer. Raises InvalidSession."""
        if is_text(self.exchange.headers.get("content-type")):
            return None
        return request_type(body, is_ours=not self._formatters.reads(self.api))

    async def read(self, body: bytes, choose: Choose | None = None) -> Message[Any]:
        """Decode the body. After this, errors have the format of the answer."""
        content_type = JSON if self._is_line else self.exchange.headers.get("content-type")
        async with self.deadline():
            body, content_type = await self._formatters.read(self.api, body, content_type)
        if choose is not None:
            self.api = choose(body, content_type)
        message = self.api.read(body, content_type, self._model)
        if self._is_line and message.format.is_streamed:
            self.service.front_end.report_ignored((IGNORED_STREAM,), self.exchange.request_id)
        message = whole(message) if self._is_line else message
        self._format = message.format
        return message

    async def parse(self, message: Message[Any]) -> Parsed[Any]:
        """Check the requests, choose their adapters, and log the names that they ignore."""
        parsed = self.api.parse(self._formatters.asked(self.api, message))
        self._format = parsed.format
        parsed = await choose_adapter(self.exchange, self.service, parsed)
        self.exchange.model = parsed.requests[0].adapter or self.exchange.model
        self._format = parsed.format
        self.service.front_end.report_ignored(parsed.ignored, self.exchange.request_id)
        self.service.check_sequences(parsed.requests)
        requests = parsed.requests
        if self.session is not None:
            requests = tuple(replace(each, session=self.session) for each in requests)
        if (priority := client_priority(self.exchange)) is not None:
            requests = tuple(replace(each, priority=priority) for each in requests)
        return parsed if requests is parsed.requests else replace(parsed, requests=requests)

    def with_origin(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The requests for the engine's queue, which lets in the first, and the others with it."""
        timeout_s, since_s, _ = self._timeout
        deadline_s = math.inf if timeout_s is None else since_s + timeout_s
        client = client_of(self.exchange, requests[0].adapter)
        first = Origin(client, self.started_s, deadline_s, self._is_line)
        further = Origin(client, self.started_s, deadline_s, is_further=True)
        return [replace(each, origin=further if index else first) for index, each in enumerate(requests)]

    def formatter(self, message: Message[Any], parsed: Parsed[Any]) -> tuple[AsyncFormatter, Parsed[Any]]:
        """Return the formatter of the answer, and the requests that it needs."""
        return self._formatters.choose(self.api, message, parsed)

    def rendered(self, error: LmiError, *, accepted: bool = False) -> Rendered:
        """Return the error in the form of the API, or with `accepted` as the last record of the answer."""
        format = self._format or self.api.default_format(self._model)
        return self.api.errors.render(error, format, accepted=accepted, request_id=self.exchange.request_id)

    async def refuse(self, error: LmiError) -> None:
        rendered = self.rendered(error)
        self.exchange.error_label = error.label
        body = self.api.whole(rendered.media_type, rendered.body)
        await self.exchange.send_whole(rendered.status, rendered.media_type, body, rendered.headers.items())

    def deadline(self) -> AbstractAsyncContextManager[None]:
        return self.exchange.deadline(*self._timeout)

    @property
    def _timeout(self) -> tuple[float | None, float, str]:
        """The seconds for the whole answer, since when they count, and whose time that is.

        The client's time is that of a whole body. The server's is that of each line by itself.
        """
        predict_timeout_s, arrived_s = self.service.config.server.predict_timeout_s, self.exchange.started_s
        end_s = math.inf if predict_timeout_s is None else self.started_s + predict_timeout_s
        if arrived_s + self._client_timeout_s < end_s:
            return self._client_timeout_s, arrived_s, "as the client asked"
        return predict_timeout_s, self.started_s, "the server's predict_timeout"

    def close(self) -> None:
        self._formatters.close()


def whole(message: Message[Any]) -> Message[Any]:
    """Return the message with an answer that is not streamed, whatever it asks for."""
    fields = {name: value for name, value in message.fields.items() if name != "stream"}
    return replace(message, fields=fields, format=replace(message.format, output_format=OutputFormat.JSON))


async def stream_answer(inference: Inference, parsed: Parsed[Any], formatter: AsyncFormatter) -> None:
    """Generate and send the answer. Raises LmiError only before the first byte."""
    exchange = inference.exchange
    body = Body(exchange, formatter, is_ascii=inference.service.config.server.ascii_streams)
    try:
        await generate(inference, parsed, formatter, body.take)
    except LmiError as error:  # the engine is already free, even if the client reads the rest slowly
        if not exchange.status:
            raise
        exchange.error_label = error.label
        await body.fail(inference.rendered(error, accepted=True))
    await body.end(inference.api)


async def generate(inference: Inference, parsed: Parsed[Any], formatter: AsyncFormatter, send: Send) -> None:
    """Generate the answer, and pass the records that the formatter writes to `send`.

    A token goes from the engine's socket to the client's in one turn of the event loop, while this task sleeps.
    """
    service, exchange = inference.service, inference.exchange
    assert service.pipeline is not None
    with (
        closing(formatter),
        Meter(service.record, inference.started_s, exchange.noted, parsed.requests, service.model.name) as meter,
    ):
        exchange.scope.get("lmi.meters", []).append(meter)  # without traces nobody has the list

        def take(delta: Delta) -> Awaitable[None] | None:
            meter.count(delta)
            if isinstance(formatter, Formatter):
                return send(formatter.feed(delta))
            return send_later(formatter, delta, send)

        async with inference.deadline():
            await formatter.begin()
            await service.pipeline.generate(inference.with_origin(parsed.requests), take)


async def send_later(formatter: AsyncFormatter, delta: Delta, send: Send) -> None:
    records = formatter.feed(delta)
    if (sent := send(records if isinstance(records, list) else await records)) is not None:
        await sent


class Meter:
    """Counts one answer while it is generated: tokens, time to the first, time between tokens, and the finish reason.

    Tokens that come in parts are timed here, when they come; those of a sequence that comes whole by the engine. The
    Meter runs for every token, so it uses views and plain numbers, and writes the totals when the answer ends: the
    time and the lengths of a whole one only. `noted` gets tokens and the time to the first, for the log. Spans are made
    of its public fields, whose times are those of time.monotonic().
    """

    def __init__(
        self,
        record: FrontEndRecord,
        started_s: float,
        noted: defaultdict[str, float],
        requests: Sequence[GenerationRequest],
        model: str,
    ) -> None:
        self.requests, self.model = requests, model
        self.started_s = self.last_token_s = self.ended_s = started_s
        self.first_token_s = math.inf
        self.times: list[RequestPerfMetrics] = []  # of sequences that have ended
        self.lengths: defaultdict[int, int] = defaultdict(int)  # tokens of each sequence
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.outcome = "cancelled"
        self._is_timed_here = any(map(comes_in_parts, requests))
        self._record, self._noted = record, noted
        self._inter_token_latency_s = record.inter_token_latency_s

    def __enter__(self) -> Self:
        return self

    def count(self, delta: Delta) -> None:
        num_tokens = len(delta.tokens)
        if delta.times is not None:
            self.times.append(delta.times)
            if not self._is_timed_here:
                self._read_times(delta.times, num_tokens)
        if self._is_timed_here and num_tokens:
            now_s = time.monotonic()
            if self.lengths:
                self._inter_token_latency_s.observe((now_s - self.last_token_s) / num_tokens, num_tokens)
            else:
                self._note_first(now_s)
            self.last_token_s = now_s
        if num_tokens:
            self.lengths[delta.index] += num_tokens
        if delta.num_prompt_tokens:
            self.num_prompt_tokens += delta.num_prompt_tokens
            self.num_cached_tokens += delta.num_cached_tokens
            self._record.prompt_length.observe(delta.num_prompt_tokens)
            self._record.prefill_length.observe(delta.num_prompt_tokens - delta.num_cached_tokens)
            self._record.num_prompt_tokens += delta.num_prompt_tokens
            self._record.num_cached_tokens += delta.num_cached_tokens
            self._noted["prompt_tokens"] += delta.num_prompt_tokens
            self._noted["cached_tokens"] += delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.outcome = delta.finish_reason

    def _note_first(self, first_s: float) -> None:
        self.first_token_s = first_s
        self._record.time_to_first_token_s.observe(first_s - self.started_s)
        self._noted.setdefault("ttft_ms", round((first_s - self.started_s) * 1000, 1))

    def _read_times(self, times: RequestPerfMetrics, num_tokens: int) -> None:
        if times.first_token_time is None or times.last_token_time is None:
            return
        if num_tokens > 1 and times.first_token_time == times.last_token_time:
            return  # an engine's own search gives all tokens at its end
        self.first_token_s = min(self.first_token_s, times.first_token_time)
        self.last_token_s = max(self.last_token_s, times.last_token_time)
        if num_tokens > 1:
            mean_s = (times.last_token_time - times.first_token_time) / (num_tokens - 1)
            self._inter_token_latency_s.observe(mean_s, num_tokens - 1)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.ended_s = time.monotonic()
        self.outcome = "error" if isinstance(error, LmiError) else self.outcome
        if not self._is_timed_here and self.first_token_s < math.inf:
            self._note_first(self.first_token_s)
        num_tokens = sum(self.lengths.values())
        self._record.num_generated_tokens += num_tokens
        self._noted["generated_tokens"] += num_tokens
        if kind is None:
            self._record.answer_time_s.observe(self.ended_s - self.started_s)
            longest = max(self.lengths.values(), default=0)
            self._record.longest_sequence.observe(longest)
            if longest > 1 and self.last_token_s > self.first_token_s:
                mean_s = (self.last_token_s - self.first_token_s) / (longest - 1)
                self._record.time_per_output_token_s.observe(mean_s)
            sequence_length = self._record.sequence_length
            for length in self.lengths.values():
                sequence_length.observe(length)
        self._record.num_finished.add(self.outcome)
