"""`lmi run-batch`: a file of requests in the form of OpenAI's batches, and a file of their answers.

A line is `{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": …}`. Its answer is written when it
comes: `{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": …}, "error": null}`. An error
says why the server has not answered.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO
from uuid import uuid4

import click
import httpx2
import orjson

from lmi.client.talk import base_of, headers_of

BUSY = (429, 503)
MAX_TRIES, PAUSE_S = 20, 1.0
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


async def run_batch(source: BinaryIO, target: BinaryIO, url: str, api_key: str | None, num_at_once: int) -> int:
    """Ask for every line of `source`, `num_at_once` at a time. Returns how many were not answered with 200."""
    num_failed = 0
    async with httpx2.AsyncClient(base_url=base_of(url), headers=headers_of(api_key), timeout=None) as client:
        async for answer in _answers(client, _requests(source), num_at_once):
            num_failed += answer["error"] is not None or answer["response"]["status_code"] != 200
            target.write(orjson.dumps(answer) + b"\n")
            target.flush()
    return num_failed


def _requests(source: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield each line. Raises ClickException for one that is none, with its number."""
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            asked = orjson.loads(line)
            named = {name: asked[name] for name in ("custom_id", "url", "body")}
        except (ValueError, TypeError, KeyError) as error:
            raise click.ClickException(f"line {number}: not a request with custom_id, url and body: {error}") from None
        if named["url"] not in ROUTES:
            raise click.ClickException(f"line {number}: url={named['url']!r}: allowed is {', '.join(ROUTES)}")
        yield named


async def _answers(
    client: httpx2.AsyncClient, requests: Iterator[dict[str, Any]], num_at_once: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield answers as they come. The next line is read when there is room for it."""
    running: set[asyncio.Task[dict[str, Any]]] = set()
    for asked in requests:
        running.add(asyncio.create_task(_answer(client, asked)))
        if len(running) == num_at_once:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    for ended in asyncio.as_completed(running):
        yield await ended


async def _answer(client: httpx2.AsyncClient, asked: dict[str, Any]) -> dict[str, Any]:
    """Ask again where the server is busy, when it says that it may have room."""
    answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": asked["custom_id"], "response": None, "error": None}
    body = {name: value for name, value in asked["body"].items() if name != "stream"}
    for _ in range(MAX_TRIES):
        try:
            response = await client.post(asked["url"].removeprefix("/v1/"), json=body)
        except httpx2.TransportError as error:
            return answer | {"error": {"code": "server_lost", "message": str(error) or type(error).__name__}}
        if response.status_code not in BUSY:
            break
        await asyncio.sleep(float(response.headers.get("Retry-After", PAUSE_S)))
    found = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": orjson.loads(response.content),
    }
    return answer | {"response": found}
