"""One run of `lmi bench`: warm-up, rounds in which the servers take turns, and the line that shows how far they are."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import click
import httpx2

from lmi.client.bench.dialects import Ask
from lmi.client.bench.load import Load, Sample, first_model
from lmi.client.bench.processes import cpu_of

SHOW_EVERY_S = 0.25


@dataclass
class Served:
    """A server, what its requests saw in each round, and the CPU seconds of its processes if it is on this machine."""

    url: str
    load: Load
    rounds: list[list[Sample]] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    async def round(self, asks: Sequence[Ask], seed: int) -> None:
        before_s = cpu_of(self.url)
        self.rounds.append(await self.load.run(iter(asks), seed))
        for name, until_s in cpu_of(self.url).items():
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + until_s - before_s.get(name, 0.0)


async def run(servers: Sequence[Served], asks: Iterator[Ask], num_warmup: int, num_requests: int, rounds: int) -> None:
    """Run the rounds. In each, every server is asked the same, the first one first in every other round.

    Raises ClickException for a server that answers none of the warm-up, or lists no model where it must be named.
    """
    shown = asyncio.create_task(_show(servers, rounds * num_requests))
    try:
        for server in servers:
            if server.load.dialect.needs_model and not server.load.model:
                server.load.model = await first_model(server.load.client)
        warmup = list(itertools.islice(asks, num_warmup))
        for server in servers:
            await _warm_up(server, warmup)
        for number in range(rounds):
            part = list(itertools.islice(asks, num_requests))
            for server in servers if number % 2 == 0 else reversed(servers):
                await server.round(part, seed=number)
    finally:
        shown.cancel()
        for server in servers:
            await server.load.client.aclose()


async def _warm_up(server: Served, asks: Sequence[Ask]) -> None:
    outcomes = {sample.outcome for sample in await server.load.run(iter(asks))}
    if outcomes and "200" not in outcomes:
        raise click.ClickException(f"{server.url} answers no request of the warm-up: {', '.join(sorted(outcomes))}")


async def _show(servers: Sequence[Served], num_requests: int) -> None:
    """Keep one line on a terminal up to date."""
    seen: list[list[Sample]] = [[] for _ in servers]
    for server, samples in zip(servers, seen, strict=True):
        server.load.on_sample = samples.append
    if not sys.stderr.isatty():
        return
    try:
        while True:
            await asyncio.sleep(SHOW_EVERY_S)
            click.echo(
                "\r\033[K" + "  ".join(map(_line, servers, seen, itertools.repeat(num_requests))), err=True, nl=False
            )
    finally:
        click.echo("\r\033[K", err=True, nl=False)


def _line(server: Served, samples: list[Sample], num_requests: int) -> str:
    num_failed = sum(not sample.is_ok for sample in samples)
    num_tokens = sum(sample.num_tokens for sample in samples)
    return (
        f"{server.url}: {len(samples)}/{num_requests} requests with warm-up, {num_failed} failed, {num_tokens} tokens"
    )


def client_of(url: str, headers: dict[str, str]) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=None, limits=limits, trust_env=False
    )
