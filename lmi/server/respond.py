"""One inference request, from its body to the bytes of its answer.

The response's head is held back until the first Delta or error exists, so that an early failure has
a real status, but not for longer than `stream_keepalive`. After the first byte an error is written
in the format of the answer, and the body ends.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from sys import getsizeof
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from lmi.adapters.choice import choose_adapter
from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import Message, Parsed, is_text
from lmi.apis.base.errors import RenderedError
from lmi.apis.base.formatters import AsyncFormatter, Formatter
from lmi.errors import LmiError
from lmi.http.exchange import Exchange
from lmi.sequences import LONG_BYTES
from lmi.server.answer_body import AnswerBody
from lmi.server.answer_stats import AnswerStats
from lmi.server.client_headers import client_of, client_priority, client_timeout_s
from lmi.server.service import Service
from lmi.server.waiting import EarlyStart, Send
from lmi.sessions.http import change_session, request_type, session_of
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, Delta, GenerationRequest, Origin

T = TypeVar("T")
Choose = Callable[[bytes, str | None], AnyApi]
# Smaller bodies are read and checked in some milliseconds.
LARGE_BODY = 128 << 10  # bytes


async def serve_request(
    exchange: Exchange,
    service: Service,
    api: AnyApi,
    model: ModelConfig | None = None,
    choose: Choose | None = None,
) -> None:
    """Read one inference request and answer it, with an error if it fails.

    `model` has the name that the path has for it. `choose` finds the API from the body and its
    content type, if a path serves several; only such a path opens and closes sessions. Until the
    body is read the API is `api`.
    """
    with closing(Inference(exchange, service, api, model)) as inference:
        body = await inference.receive()
        session_request = None
        if choose is not None and not is_text(inference.content_type):
            is_ours = not inference.hooks.changes_bodies
            session_request = request_type(body, is_ours=is_ours)

        if session_request is not None:
            await change_session(exchange, service, session_request)
            return

        is_large = len(body) > LARGE_BODY
        turn = service.front_end.turn_to_read(exchange) if is_large else nullcontext()
        async with turn:
            message = await inference.read(body, choose)
            # Only the message is held while the requests are checked.
            del body

            inference.session = await session_of(exchange, service)
            parsed = await inference.parse(message)
            message = inference.hooks.message_to_keep(message)

        parsed = await inference.complete(parsed)
        with service.admitted(parsed.num_places):
            # From here on only `inference` holds the whole requests, until the pipeline takes them.
            formatter, parsed = inference.begin_answer(message, parsed)
            await exchange.run_while_there(stream_answer(inference, parsed, formatter))


class Timeout(NamedTuple):
    """How long the whole answer may take (None: for ever), since when, and who says so."""

    timeout_s: float | None
    since_s: float
    whose: str


class Inference:
    """One inference request: its API, and what it makes of a body, of an error and of the requests
    in it.

    The API is that of the path until the body has chosen one. The format of the answer is None
    until the body is read.
    """

    # Whether it is one line of a body of which another request was let in. The caller holds a place
    # in the queue for it.
    is_line = False

    def __init__(
        self, exchange: Exchange, service: Service, api: AnyApi, model: ModelConfig | None = None
    ) -> None:
        self.exchange = exchange
        self.service = service
        self.api = api
        self.model = model or service.model

        self.content_type = exchange.headers.get("content-type")
        # The id of its session, if it names one.
        self.session: str | None = None
        self.started_s = exchange.started_s
        # Since when it waits for a place.
        self.received_s = exchange.started_s
        self.client_timeout_s = math.inf
        self.format: AnswerFormat | None = None

        self.hooks = service.hooks_for(exchange, api, is_admitted=self.is_line)

        # The bytes that became the requests.
        self._num_body_bytes = 0
        # Those of them that the answer's format holds, beside the requests' texts, ids and images.
        self._num_format_bytes = 0
        # The requests until the pipeline has them.
        self._requests: Sequence[GenerationRequest] = ()

    async def receive(self) -> bytes:
        """Return the body of the HTTP request. From here on the exchange is refused in the form of
        the API.
        """
        exchange = self.exchange
        service = self.service
        exchange.refuse = self.refuse
        # A full server does not read the body.
        service.check_room()
        self.client_timeout_s = client_timeout_s(exchange)
        if not self.hooks.changes_bodies:
            exchange.check_is_whole()

        max_bytes = service.config.server.max_request_size
        body = await exchange.body(max_bytes, service.front_end.body_memory)
        self.received_s = time.monotonic()
        return body

    async def read(self, body: bytes, choose: Choose | None = None) -> Message[Any]:
        """Decode the body. After this, errors have the format of the answer."""
        async with self.deadline():
            body, content_type = await self.hooks.change_body(body, self.content_type)

        self._num_body_bytes = len(body)
        if choose is not None:
            self.api = choose(body, content_type)

        message = await self._beside_the_loop(self.api.read, body, content_type, self.model)
        self.format = message.format
        return message

    async def parse(self, message: Message[Any]) -> Parsed[Any]:
        """Check the requests. Raises Overloaded if there is no room for what was made of their
        body.
        """
        message = self.hooks.change_message(self.api, message)
        parsed = await self._beside_the_loop(self.api.parse, message)
        self.format = parsed.format
        if self.is_long:
            self._hold_requests(parsed)

        return parsed

    def _hold_requests(self, parsed: Parsed[Any]) -> None:
        """Count what is held from now on in place of a long body."""
        num_bytes = sum(request.num_bytes for request in parsed.requests)
        self._num_format_bytes = 0
        if parsed.format.holds_fields:
            self._num_format_bytes = max(0, self._num_body_bytes - num_bytes)

        self.hold(num_bytes + self._num_format_bytes)

    async def complete(self, parsed: Parsed[Any]) -> Parsed[Any]:
        """Choose the adapters of the requests, add what the headers say, and log the names that
        they ignore.
        """
        before_s = time.monotonic()
        parsed = await choose_adapter(self.exchange, self.service, parsed)
        # The load of an adapter is no wait for a place.
        self.received_s += time.monotonic() - before_s

        self.exchange.model = parsed.requests[0].adapter or self.exchange.model
        self.format = parsed.format
        self.service.front_end.report_ignored(parsed.ignored, self.exchange.request_id)
        self.service.check_sequences(parsed.requests)

        changes: dict[str, Any] = {}
        if self.session is not None:
            changes["session"] = self.session

        request_priority = client_priority(self.exchange)
        if request_priority is not None:
            changes["priority"] = request_priority

        if not changes:
            return parsed

        requests = tuple(replace(request, **changes) for request in parsed.requests)
        return replace(parsed, requests=requests)

    async def _beside_the_loop(self, work: Callable[..., T], *arguments: object) -> T:
        """Do what takes long for a large body, in a thread if it is one, so that others have their
        turns meanwhile.
        """
        if self._num_body_bytes > LARGE_BODY:
            return await asyncio.to_thread(work, *arguments)

        return work(*arguments)

    @property
    def is_long(self) -> bool:
        """Whether the body is not held, nor what was made of it, until the answer has ended."""
        return self._num_body_bytes > LONG_BYTES

    def hold(self, num_bytes: int) -> None:
        """Count the bytes that are held of the body now. Raises Overloaded if there is no room for
        more.
        """
        self.exchange.hold(num_bytes)

    def begin_answer(
        self, message: Message[Any], parsed: Parsed[Any]
    ) -> tuple[AsyncFormatter, Parsed[Any]]:
        """Return what writes the answer, and the requests as far as it needs them. `take_requests`
        has them whole.
        """
        parsed = self.hooks.change_requests(self.api, message, parsed)
        self._requests = parsed.requests
        for_answer = self._for_answer(parsed)
        formatter = self.hooks.formatter(self.api, message, parsed, for_answer)
        return formatter, for_answer

    def _for_answer(self, parsed: Parsed[Any]) -> Parsed[Any]:
        """Return the requests without what only engines need, if their body is long."""
        if not self.is_long:
            return parsed

        keeps_prompt = parsed.format.details
        lighter = []
        for request in parsed.requests:
            lighter.append(request.for_answer(keeps_prompt=keeps_prompt))
            # An answer that begins with its prompt has it counted beside its sequences.
            if keeps_prompt and not request.return_full_text:
                self._num_format_bytes += getsizeof(request.prompt)

        return replace(parsed, requests=tuple(lighter))

    def take_requests(self) -> list[GenerationRequest]:
        """Return the requests for the engine's queue, which lets in the first, and the others with
        it.

        They are not held here any more.
        """
        requests = self._requests
        self._requests = ()

        limit = self._timeout
        deadline_s = math.inf
        if limit.timeout_s is not None:
            deadline_s = limit.since_s + limit.timeout_s

        client = client_of(self.exchange, requests[0].adapter)
        first = Origin(
            client,
            self.started_s,
            deadline_s,
            is_further=self.is_line,
            received_s=self.received_s,
        )
        further = Origin(client, self.started_s, deadline_s, is_further=True)

        with_origins = [replace(requests[0], origin=first)]
        for request in requests[1:]:
            with_origins.append(replace(request, origin=further))

        return with_origins

    def note_encoded(self, num_bytes: int) -> None:
        """Hold no more than `num_bytes` of the requests from now on: they are encoded, and their
        frames do not count yet.
        """
        if self.is_long:
            self.hold(num_bytes + self._num_format_bytes)

    def rendered(self, error: LmiError, *, accepted: bool = False) -> RenderedError:
        """Return the error in the form of the API, or with `accepted` as the last record of the
        answer.
        """
        format = self.format or self.api.default_format(self.model)
        return self.api.errors.render(
            error, format, accepted=accepted, request_id=self.exchange.request_id
        )

    async def refuse(self, error: LmiError) -> None:
        """Send an error as the whole answer."""
        rendered = self.rendered(error)
        body = self.api.whole(rendered.media_type, rendered.body)
        await self.exchange.send_whole(
            rendered.status, rendered.media_type, body, rendered.headers.items()
        )

    def deadline(self) -> AbstractAsyncContextManager[None]:
        return self.exchange.deadline(*self._timeout)

    @property
    def _timeout(self) -> Timeout:
        """The time for the whole answer.

        The client's time is that of a whole body. The server's is that of each line by itself.
        """
        predict_timeout_s = self.service.config.server.predict_timeout_s
        arrived_s = self.exchange.started_s
        end_s = math.inf
        if predict_timeout_s is not None:
            end_s = self.started_s + predict_timeout_s

        if arrived_s + self.client_timeout_s < end_s:
            return Timeout(self.client_timeout_s, arrived_s, "as the client asked")

        return Timeout(predict_timeout_s, self.started_s, "the server's predict_timeout")

    def close(self) -> None:
        self.hooks.close()


async def stream_answer(
    inference: Inference, parsed: Parsed[Any], formatter: AsyncFormatter
) -> None:
    """Generate and send the answer. Raises LmiError only before the first byte."""
    exchange = inference.exchange
    body = AnswerBody(exchange, formatter, is_ascii=inference.service.config.server.ascii_streams)
    try:
        await generate(inference, parsed, formatter, body.take)
    except LmiError as error:
        # The engine is already free, even if the client reads what is left of the answer slowly.
        if not exchange.status:
            raise

        exchange.error_label = error.label
        await body.fail(inference.rendered(error, accepted=True))

    await body.end(inference.api)


async def generate(
    inference: Inference, parsed: Parsed[Any], formatter: AsyncFormatter, send: Send
) -> None:
    """Generate the answer, and pass the records that the formatter writes to `send`.

    A token goes from the engine's socket to the client's in one turn of the event loop, while this
    task sleeps.
    """
    service = inference.service
    exchange = inference.exchange
    assert service.pipeline is not None

    stats = AnswerStats(
        service.record,
        inference.started_s,
        exchange.log_fields,
        parsed.requests,
        service.model.name,
    )
    with closing(formatter), stats:
        # Without traces nobody has the list.
        exchange.scope.get("lmi.answers", []).append(stats)

        def take(delta: Delta) -> Awaitable[None] | None:
            stats.count(delta)
            if isinstance(formatter, Formatter):
                return send(formatter.feed(delta))

            return send_later(formatter, delta, send)

        settings = service.config.server
        period_s = None if settings.buffer_streams else settings.stream_keepalive_s
        early_start = EarlyStart(formatter, send, period_s, inference.started_s)
        async with inference.deadline(), early_start as early:
            await formatter.begin()
            prepared = await service.pipeline.prepare(inference.take_requests())
            inference.note_encoded(sum(sequences.num_bytes for sequences in prepared))
            await service.pipeline.generate(prepared, take, early.streams)


async def send_later(formatter: AsyncFormatter, delta: Delta, send: Send) -> None:
    """Send the records of a formatter that may have to wait for them, as that of user code."""
    records = formatter.feed(delta)
    if not isinstance(records, list):
        records = await records

    pause = send(records)
    if pause is not None:
        await pause
