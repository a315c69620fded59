"""What `lmi bench` does with its settings: warm-up, rounds in which the servers take turns, and
what comes of them.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click
import orjson

from lmi.client.bench.dialects import DIALECTS, Ask
from lmi.client.bench.figures import report_of
from lmi.client.bench.load import Load, client_of, first_model
from lmi.client.bench.page import page_of
from lmi.client.bench.prompts import of_file, synthetic
from lmi.client.bench.table import table_of
from lmi.client.server import headers_of

MAX_SERVERS = 2
# What flags call these latencies.
TARGETS = {"first_s": "ttft", "gap_s": "itl", "end_s": "e2e"}
CLEAR_LINE = "\r\033[K"
# How often the progress is shown on a terminal, and where each time is a line.
SHOW_EVERY_S = 0.25
SAY_EVERY_S = 10.0


def bench(settings: dict[str, Any]) -> int:
    """Run, print the table and write the files. Returns 1 if a request has no whole answer."""
    urls = settings["urls"]
    api_key = settings.pop("api_key")
    if len(urls) > MAX_SERVERS:
        raise click.UsageError(f"{len(urls)} URLs: at most {MAX_SERVERS} servers take turns")

    if not settings["rounds"]:
        settings["rounds"] = 1 if len(urls) == 1 else 3

    json_file = settings.pop("json_file")
    html_file = settings.pop("html_file")
    png_file = settings.pop("png_file")
    if png_file:
        # It comes before the load, because Pillow may be missing.
        from lmi.client.bench.picture import write_picture

    settings["body"] = _object(settings["body"])
    servers = [_load_of(url, api_key, settings) for url in urls]
    plan = BenchPlan(settings["num_warmup"], settings["num_requests"], settings["rounds"])
    asyncio.run(run(servers, _asks(settings), plan))

    report = report_of(settings, servers, _targets_s(settings))
    click.echo(table_of(report))
    if json_file:
        json_file.write_bytes(orjson.dumps(report, default=str, option=orjson.OPT_INDENT_2))

    if html_file:
        html_file.write_text(page_of(report))

    if png_file:
        write_picture(report, png_file)

    totals = [server["total"] for server in report["servers"]]
    has_failed = any(total["num_ok"] < total["num_requests"] for total in totals)
    return 1 if has_failed else 0


def _targets_s(settings: dict[str, Any]) -> dict[str, float]:
    """Return the latencies that no good answer exceeds, by name, in seconds."""
    targets_s = {}
    for name, flag in TARGETS.items():
        target_ms = settings[f"target_{flag}_ms"]
        if target_ms is not None:
            targets_s[name] = target_ms / 1e3

    return targets_s


def _load_of(url: str, api_key: str | None, settings: dict[str, Any]) -> Load:
    """Return the load of a server that the settings describe."""
    return Load(
        url,
        client_of(url, headers_of(api_key)),
        DIALECTS[settings["dialect"]],
        is_streamed=not settings["is_whole"],
        extra=settings["body"],
        model=settings["model"],
        num_streams=settings["num_streams"],
        rate=settings["rate"],
        timeout_s=settings["timeout_s"],
    )


def _object(text: str) -> dict[str, Any]:
    """Return the fields that `--body` adds to each body. Raises UsageError."""
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--body: not JSON: {error}") from None

    if not isinstance(value, dict):
        raise click.UsageError(f"--body={text}: not a JSON object")

    return value


def _asks(settings: dict[str, Any]) -> Iterator[Ask]:
    """Return the prompts of the file, else made ones, without an end."""
    if settings["prompts"]:
        return of_file(settings["prompts"], settings["max_tokens"])

    return synthetic(
        settings["num_words"],
        settings["num_shared_words"],
        settings["num_prefixes"],
        settings["max_tokens"],
        settings["seed"],
    )


class BenchPlan(NamedTuple):
    """How much each server is asked: before the rounds, and in each round."""

    num_warmup: int
    num_requests: int
    num_rounds: int


async def run(servers: Sequence[Load], asks: Iterator[Ask], plan: BenchPlan) -> None:
    """Run the rounds. In each, every server is asked the same, the first one first in every other
    round.

    Raises ClickException for a server that answers none of the warm-up, or lists no model where it
    must be named.
    """
    num_requests = plan.num_warmup + plan.num_rounds * plan.num_requests
    progress = asyncio.create_task(_show(servers, num_requests))
    try:
        for server in servers:
            if server.dialect.needs_model and not server.model:
                server.model = await first_model(server.client)

        asks_of_warmup = list(itertools.islice(asks, plan.num_warmup))
        for server in servers:
            await _warm_up(server, asks_of_warmup)

        for number in range(plan.num_rounds):
            asks_of_round = list(itertools.islice(asks, plan.num_requests))
            for server in servers if number % 2 == 0 else reversed(servers):
                await server.round(asks_of_round, seed=number)
    finally:
        progress.cancel()
        for server in servers:
            await server.client.aclose()


async def _warm_up(server: Load, asks: Sequence[Ask]) -> None:
    """Ask before the rounds. Raises ClickException if there are no whole answers."""
    samples = await server.run(iter(asks))
    outcomes = {sample.outcome for sample in samples}
    if outcomes and "200" not in outcomes:
        why = f"answers no request of the warm-up: {', '.join(sorted(outcomes))}"
        raise click.ClickException(f"{server.url} {why}")


async def _show(servers: Sequence[Load], num_requests: int) -> None:
    """Show how far each server is: in one line of a terminal, else with a line now and then."""
    began_s = time.perf_counter()
    is_terminal = sys.stderr.isatty()
    beginning = CLEAR_LINE if is_terminal else ""
    ending = "" if is_terminal else "\n"
    every_s = SHOW_EVERY_S if is_terminal else SAY_EVERY_S

    try:
        while True:
            await asyncio.sleep(every_s)
            seconds = time.perf_counter() - began_s
            progress = "  ".join(_progress(server, num_requests) for server in servers)
            click.echo(f"{beginning}{seconds:.0f} s  {progress}{ending}", err=True, nl=False)
    finally:
        if is_terminal:
            click.echo(CLEAR_LINE, err=True, nl=False)


def _progress(server: Load, num_requests: int) -> str:
    """Return how far a server is: what has ended, what runs, and the tokens of both."""
    samples = [*server.ended, *server.running.values()]
    num_failed = sum(not sample.is_ok for sample in server.ended)
    num_tokens = sum(sample.num_tokens for sample in samples)
    ended = f"{len(server.ended)}/{num_requests} requests with warm-up"
    return (
        f"{server.url}: {ended}, {len(server.running)} running, {num_failed} failed, "
        f"{num_tokens} tokens"
    )
