"""What `lmi bench` does with its settings: warm-up, rounds in which the servers take turns, and
what comes of them.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click
import orjson

from lmi.client.ask import headers_of
from lmi.client.bench.dialects import DIALECTS, Ask
from lmi.client.bench.figures import report_of, table_of
from lmi.client.bench.load import Load, client_of, first_model, of_file, synthetic
from lmi.client.bench.page import page_of

MAX_SERVERS = 2
TARGETS = {"first_s": "ttft", "gap_s": "itl", "end_s": "e2e"}  # what flags call these latencies
CLEAR_LINE = "\r\033[K"
# on a terminal, and where each time is a line
SHOW_EVERY_S = 0.25
SAY_EVERY_S = 10.0


def bench(settings: dict[str, Any]) -> int:
    """Run, print the table and write the files. Returns 1 if a request has no whole answer."""
    urls = settings["urls"]
    api_key = settings.pop("api_key")
    if len(urls) > MAX_SERVERS:
        raise click.UsageError(f"{len(urls)} URLs: at most {MAX_SERVERS} servers take turns")

    settings["rounds"] = settings["rounds"] or (1 if len(urls) == 1 else 3)
    files = {page: settings.pop(page) for page in ("json_file", "html_file", "png_file")}
    if files["png_file"]:
        from lmi.client.bench.picture import (
            write_picture,
        )  # before the load, where Pillow is missing

    extra = settings["body"] = _object(settings["body"])
    servers = [
        Load(
            url,
            client_of(url, headers_of(api_key)),
            DIALECTS[settings["dialect"]],
            is_streamed=not settings["is_whole"],
            extra=extra,
            **{name: settings[name] for name in ("model", "num_streams", "rate", "timeout_s")},
        )
        for url in urls
    ]
    counts = (settings["num_warmup"], settings["num_requests"], settings["rounds"])
    asyncio.run(run(servers, _asks(settings), *counts))
    limits_ms = {name: settings[f"target_{flag}_ms"] for name, flag in TARGETS.items()}
    found = report_of(
        settings,
        servers,
        {name: limit / 1e3 for name, limit in limits_ms.items() if limit is not None},
    )
    click.echo(table_of(found))
    if files["json_file"]:
        files["json_file"].write_bytes(orjson.dumps(found, default=str, option=orjson.OPT_INDENT_2))

    if files["html_file"]:
        files["html_file"].write_text(page_of(found))

    if files["png_file"]:
        write_picture(found, files["png_file"])

    return int(
        any(
            server["total"]["num_ok"] < server["total"]["num_requests"]
            for server in found["servers"]
        )
    )


def _object(text: str) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--body: not JSON: {error}") from None

    if not isinstance(found, dict):
        raise click.UsageError(f"--body={text}: not a JSON object")

    return found


def _asks(settings: dict[str, Any]) -> Iterator[Ask]:
    if settings["prompts"]:
        return of_file(settings["prompts"], settings["max_tokens"])

    names = ("num_words", "num_shared_words", "num_prefixes", "max_tokens", "seed")
    return synthetic(*(settings[name] for name in names))


async def run(
    servers: Sequence[Load], asks: Iterator[Ask], num_warmup: int, num_requests: int, rounds: int
) -> None:
    """Run the rounds. In each, every server is asked the same, the first one first in every other
    round.

    Raises ClickException for a server that answers none of the warm-up, or lists no model where it
    must be named.
    """
    shown = asyncio.create_task(_show(servers, num_warmup + rounds * num_requests))
    try:
        for server in servers:
            if server.dialect.needs_model and not server.model:
                server.model = await first_model(server.client)

        warmup = list(itertools.islice(asks, num_warmup))
        for server in servers:
            outcomes = {sample.outcome for sample in await server.run(iter(warmup))}
            if outcomes and "200" not in outcomes:
                said = f"answers no request of the warm-up: {', '.join(sorted(outcomes))}"
                raise click.ClickException(f"{server.url} {said}")

        for number in range(rounds):
            part = list(itertools.islice(asks, num_requests))
            for server in servers if number % 2 == 0 else reversed(servers):
                await server.round(part, seed=number)
    finally:
        shown.cancel()
        for server in servers:
            await server.client.aclose()


async def _show(servers: Sequence[Load], num_requests: int) -> None:
    """Show how far each server is: in one line of a terminal, else with a line now and then."""
    began_s = time.perf_counter()
    is_terminal = sys.stderr.isatty()
    before, end = (CLEAR_LINE, "") if is_terminal else ("", "\n")
    try:
        while True:
            await asyncio.sleep(SHOW_EVERY_S if is_terminal else SAY_EVERY_S)
            seconds = time.perf_counter() - began_s
            shown = "  ".join(_progress(server, num_requests) for server in servers)
            click.echo(f"{before}{seconds:.0f} s  {shown}{end}", err=True, nl=False)
    finally:
        if is_terminal:
            click.echo(CLEAR_LINE, err=True, nl=False)


def _progress(server: Load, num_requests: int) -> str:
    """Return how far a server is: what has ended, what runs, and the tokens of both."""
    num_failed = sum(not sample.is_ok for sample in server.seen)
    num_tokens = sum(sample.num_tokens for sample in (*server.seen, *server.running.values()))
    ended = f"{len(server.seen)}/{num_requests} requests with warm-up"
    return (
        f"{server.url}: {ended}, {len(server.running)} running, {num_failed} failed, "
        f"{num_tokens} tokens"
    )
