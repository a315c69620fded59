"""A file of requests in the form of OpenAI's batches, and the file of their answers:
`lmi run-batch`.
"""

import asyncio
import codecs
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import click
import httpx2
import orjson

from lmi.client import answers
from lmi.client.answers import Json, OddAnswer
from lmi.client.server import base_of, headers_of
from lmi.errors import shorten
from lmi.shared import log

BUSY = (429, 503)
MAX_TRIES = 20
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
NO_REQUEST = "not a request with custom_id, url and body"


async def run_batch(
    source: BinaryIO,
    target: BinaryIO,
    url: str,
    api_key: str | None,
    num_at_once: int,
    timeout_s: float,
) -> int:
    """Ask for every line of `source`, `num_at_once` at a time, and wait `timeout_s` for each
    answer. Returns how many were not answered with 200.

    A line has the form of OpenAI's batches, `{"custom_id": …, "url": "/v1/chat/completions",
    "body": …}`. Its answer is written when it comes: `{"id": …, "custom_id": …, "response":
    {"status_code": …, "request_id": …, "body": …}, "error": null}`. An error says why the server
    has not answered, or was not asked.
    """
    lines = _lines(source)
    async with httpx2.AsyncClient(
        base_url=base_of(url), headers=headers_of(api_key), timeout=None
    ) as client:
        asker = _Asker(client, timeout_s)

        async def ask_on() -> int:
            """Take the next line that nobody has taken, and the next after its answer."""
            num_failed = 0
            for line in lines:
                answer = await asker.answer(line)
                if answer["error"] is not None or answer["response"]["status_code"] != 200:
                    num_failed += 1

                target.write(orjson.dumps(answer) + b"\n")
                target.flush()

            return num_failed

        nums_failed = await asyncio.gather(*[ask_on() for _ in range(num_at_once)])
        return sum(nums_failed)


class BatchLine(NamedTuple):
    """A request of a file, or with a `fault` a line that is none."""

    custom_id: Any
    # What follows /v1/.
    path: str = ""
    body: Json = {}
    fault: str = ""


def _lines(source: BinaryIO) -> Iterator[BatchLine]:
    for number, line in enumerate(source, 1):
        if line.strip():
            yield _line_of(line, f"line {number}")


def _line_of(line: bytes, place: str) -> BatchLine:
    """Read a line. `place` is where it stands, for its fault."""
    try:
        # PowerShell writes a mark at the beginning.
        fields = orjson.loads(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        return BatchLine(None, fault=f"{place}: {NO_REQUEST}: {error}")

    try:
        custom_id = fields["custom_id"]
        url = fields["url"]
        body = fields["body"]
    except (TypeError, KeyError) as error:
        custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
        return BatchLine(custom_id, fault=f"{place}: {NO_REQUEST}: {error}")

    if url not in ROUTES:
        return BatchLine(
            custom_id, fault=f"{place}: url={shorten(url)}: allowed is {', '.join(ROUTES)}"
        )

    if not isinstance(body, dict):
        return BatchLine(custom_id, fault=f"{place}: body={shorten(body)}: must be an object")

    body_without_stream = {name: value for name, value in body.items() if name != "stream"}
    return BatchLine(custom_id, url.removeprefix("/v1/"), body_without_stream)


class Reply(NamedTuple):
    """The response of a server, and its body."""

    response: httpx2.Response
    body: bytes


class NoReply(Exception):
    """A server has not answered: `code` and `message` are those of the error in a batch."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _Asker:
    """Asks a server for one line after another."""

    def __init__(self, client: httpx2.AsyncClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._told_of_line = False
        self._told_of_pause = False

    async def answer(self, line: BatchLine) -> Json:
        """Return the answer to a line."""
        answer: Json = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": line.custom_id,
            "response": None,
            "error": None,
        }
        if line.fault:
            self._tell_of_line(line.fault)
            return answer | {"error": {"code": "invalid_request", "message": line.fault}}

        try:
            response, body = await self._reply_when_free(line)
        except NoReply as error:
            return answer | {"error": {"code": error.code, "message": error.message}}

        answer["response"] = {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id", ""),
            "body": answers.json_or_page(body),
        }
        return answer

    async def _reply_when_free(self, line: BatchLine) -> Reply:
        """Ask, and ask a busy server again when it says that it may have room. Raises NoReply."""
        for _ in range(MAX_TRIES):
            reply = await self._reply(line)
            if reply.response.status_code not in BUSY:
                return reply

            pause_s, warning = answers.pause_of(reply.response.headers)
            self._tell_of_pause(warning)
            await asyncio.sleep(pause_s)

        return reply

    async def _reply(self, line: BatchLine) -> Reply:
        """Ask once. Raises NoReply, also if the whole answer takes longer than the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._client.stream("POST", line.path, json=line.body) as response:
                    is_success = response.status_code == 200
                    body = await answers.whole_of_async(response.aiter_bytes(), is_success)
        except TimeoutError:
            message = f"no whole answer in {self._timeout_s:g} s, as --timeout allows"
            raise NoReply("timeout", message) from None
        except httpx2.TransportError as error:
            raise NoReply("server_lost", str(error) or type(error).__name__) from None
        except (OddAnswer, httpx2.DecodingError) as error:
            raise NoReply("invalid_answer", str(error)) from None

        return Reply(response, body)

    def _tell_of_line(self, fault: str) -> None:
        """Tell of the first line that is no request."""
        if not self._told_of_line:
            self._told_of_line = True
            _tell(fault)

    def _tell_of_pause(self, warning: str) -> None:
        """Tell of the first pause that is not what the server asked for."""
        if warning and not self._told_of_pause:
            self._told_of_pause = True
            _tell(warning)


def _tell(text: str) -> None:
    click.echo(f"lmi: {log.escape(text)}", err=True)
