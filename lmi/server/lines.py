"""A body of JSON lines: each line is a request, and the answer has one line for each, in order.

A batch transform sends such bodies and joins its records with ours by their lines. A line is
answered as a request of its own would be, but whole, on one line, and an error in it shows its
status as `code`. The body takes one place in the queue, and as many of its sequences are in the
engines at once as they can run.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import islice
from typing import Any

import orjson
from msgspec.structs import replace

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import Message
from lmi.apis.base.formatters import one_line
from lmi.apis.base.media_types import JSON
from lmi.errors import LmiError, MalformedRequest
from lmi.http.exchange import Exchange
from lmi.server.respond import Choose, Inference, generate
from lmi.server.service import Models, Service
from lmi.sessions.folder import InvalidSession
from lmi.sessions.http import request_type, session_of
from lmi.settings.config import ServerConfig
from lmi.types import OutputFormat

MEDIA_TYPE = "application/jsonlines"
MEDIA_TYPES = (MEDIA_TYPE, "application/x-ndjson", "application/x-jsonlines")
MAX_LINES = 100_000
# SageMaker's limit for all requests of a transform that are in flight at once.
MAX_TRANSFORM_MB = 100
IGNORED_STREAM = "stream: no effect in a body of lines, whose answers are whole"
OF_A_STREAM = ("stream", "stream_options")
# It skips blank lines, however many there are.
LINE = re.compile(rb"\S[^\n]*")

log = logging.getLogger(__name__)


def are_lines(exchange: Exchange) -> bool:
    """Whether the request's content type says that its body holds JSON lines."""
    content_type = exchange.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type in MEDIA_TYPES


async def serve_lines(exchange: Exchange, service: Service, api: AnyApi, choose: Choose) -> None:
    """Read a body of lines and answer each, as many at a time as the engines run sequences.

    `choose` finds the API of a line, `api` refuses the whole body.
    """
    assert service.engines is not None
    with closing(Inference(exchange, service, api)) as body:
        content = await body.receive()
        num_lines = check_lines(content)
        # Without an engine every line would fail for the same reason.
        await service.engines.ready()
        body.session = await session_of(exchange, service)

        answers = [b""] * num_lines
        places = Places(max(1, service.num_running_sequences))
        # The lines that no worker has taken yet.
        waiting = enumerate(LINE.finditer(content))

        async def work() -> None:
            for number, line in waiting:
                if exchange.early_end is not None:
                    return

                answers[number] = await LineInference(body).answer(line[0], choose, places) + b"\n"
                # A line that is refused waits for nothing, and many would hold up other requests.
                await asyncio.sleep(0)

        async def work_together() -> None:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(num_lines, places.num)):
                    workers.create_task(work())

        with service.admitted():
            await exchange.run_while_there(work_together())

        # If the exchange ends early, the lines without an answer must not count as answered.
        exchange.check_goes_on()
        await exchange.send_whole(200, MEDIA_TYPE, b"".join(answers))


def check_lines(body: bytes) -> int:
    """Return the number of lines that are not blank. Raises MalformedRequest."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"the body is not UTF-8: byte {error.start} is wrong") from None

    num_lines = sum(1 for _ in islice(LINE.finditer(body), MAX_LINES + 1))
    if not 1 <= num_lines <= MAX_LINES:
        why = "has more" if num_lines else "is empty"
        raise MalformedRequest(f"the body {why}, 1 to {MAX_LINES} lines of JSON are needed")

    return num_lines


class Places:
    """The places for sequences of one body. A line that needs more than there are waits for all of
    them.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._num_free = num
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, num: int) -> AsyncIterator[None]:
        num = min(num, self.num)
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_free >= num)
            self._num_free -= num

        try:
            yield
        finally:
            self._num_free += num
            async with self._changed:
                self._changed.notify_all()


class LineInference(Inference):
    """One line of a body. Its answer is not streamed, whatever it asks for."""

    is_line = True

    def __init__(self, body: Inference) -> None:
        super().__init__(body.exchange, body.service, body.api, body.model)
        self.content_type = JSON
        self.session = body.session
        self.started_s = time.monotonic()
        self.client_timeout_s = body.client_timeout_s

    async def answer(self, line: bytes, choose: Choose, places: Places) -> bytes:
        """Return the answer, or the error that the line fails with, which affects no other line."""
        try:
            if request_type(line) is not None:
                raise InvalidSession("requestType", "in a body of its own", line.decode())

            message = await self.read(line, choose)
            parsed = await self.complete(await self.parse(message))
            async with places.taken(parsed.num_places):
                self.started_s = time.monotonic()
                formatter, parsed = self.begin_answer(message, parsed)
                records: list[bytes] = []
                await generate(self, parsed, formatter, records.extend)
                return one_value(b"".join(records))
        except LmiError as error:
            rendered = self.rendered(error)
            return with_code(rendered.body, rendered.status)
        except Exception:
            log.exception("a line of request %s failed in the front end", self.exchange.request_id)
            text = f"internal error, see the log for request {self.exchange.request_id}"
            return orjson.dumps({"error": text, "code": 500})
        finally:
            self.close()

    def hold(self, num_bytes: int) -> None:
        """Nothing changes: the body is held until its last line is answered."""

    async def read(self, body: bytes, choose: Choose | None = None) -> Message[Any]:
        message = await super().read(body, choose)
        dropped: tuple[str, ...] = ("stream",)
        if message.format.is_streamed:
            dropped = OF_A_STREAM
            self.service.front_end.report_ignored((IGNORED_STREAM,), self.exchange.request_id)

        fields = {name: value for name, value in message.fields.items() if name not in dropped}
        self.format = replace(message.format, output_format=OutputFormat.JSON)
        return replace(message, fields=fields, format=self.format)


def one_value(body: bytes) -> bytes:
    """Return a body as one JSON value on one line. What is not JSON, as user code may write it,
    becomes a string.
    """
    body = body.strip()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return one_line(orjson.dumps(body.decode(errors="replace")))

    has_several_lines = b"\n" in body or b"\r" in body
    return one_line(orjson.dumps(value) if has_several_lines else body)


def with_code(body: bytes, status: int) -> bytes:
    """Return the body of an error on one line, with its status in the place of an answer's status
    line.
    """
    error = orjson.loads(body)
    if "code" not in error:
        body = orjson.dumps(error | {"code": status})

    return one_value(body)


async def execution_parameters(exchange: Exchange, models: Models) -> None:
    """Tell how a batch transform should send its records."""
    server = models.front_end.config
    services = await models.listed()
    num_running_sequences = sum(service.num_running_sequences for service in services)

    fields = {
        "MaxConcurrentTransforms": num_transforms(server, num_running_sequences),
        "BatchStrategy": server.batch_strategy,
        "MaxPayloadInMB": server.max_payload_mb,
    }
    await exchange.send_json(fields)


def num_transforms(server: ServerConfig, num_running_sequences: int) -> int:
    """Return the number of requests to send at once: as many as run at once and stay under
    SageMaker's limit.
    """
    if server.max_concurrent_transforms is not None:
        return server.max_concurrent_transforms

    if server.max_payload_mb:
        num_under_limit = MAX_TRANSFORM_MB // server.max_payload_mb
        num_running_sequences = min(num_running_sequences, num_under_limit)

    return max(1, num_running_sequences)


SERVER_ROUTES = [("/execution-parameters", ["GET"], execution_parameters)]
