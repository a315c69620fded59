"""The load: clients that ask in a closed or an open loop, and what each of them saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import httpx2
import orjson

from lmi.client.bench.dialects import Ask, Dialect

LOST, TIMEOUT, BROKEN = "lost", "timeout", "broken"  # outcomes of requests that have no whole answer


@dataclass
class Sample:
    """One request. Times are seconds of `time.perf_counter`; `due_s` is when its client wanted to send it."""

    due_s: float
    end_s: float = 0.0
    outcome: str = ""  # the status, or why there is no whole answer
    times_s: list[float] = field(default_factory=list)  # of the events with text
    num_reported: int | None = None  # tokens, by the server

    @property
    def is_ok(self) -> bool:
        return self.outcome == "200"

    @property
    def num_tokens(self) -> int:
        return len(self.times_s) if self.num_reported is None else self.num_reported


@dataclass
class Load:
    """How to ask one server. A load is open if it has a rate, else closed."""

    client: httpx2.AsyncClient
    dialect: Dialect
    model: str
    is_streamed: bool = True
    num_streams: int = 8
    rate: float | None = None  # requests per second
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of each body
    on_sample: Callable[[Sample], None] = lambda sample: None

    async def run(self, asks: Iterator[Ask], seed: int = 0) -> list[Sample]:
        """Ask until `asks` ends. `seed` is that of the times at which an open load asks."""
        return await (self._closed(asks) if self.rate is None else self._open(asks, self.rate, seed))

    async def _closed(self, asks: Iterator[Ask]) -> list[Sample]:
        """Each stream asks again when it has its answer."""

        async def stream() -> list[Sample]:
            return [await self.ask(ask, time.perf_counter()) for ask in asks]

        return sum(await asyncio.gather(*(stream() for _ in range(self.num_streams))), [])

    async def _open(self, asks: Iterator[Ask], rate: float, seed: int) -> list[Sample]:
        """Requests come as a Poisson process does, whatever became of those before."""
        dice, due_s, running = random.Random(seed), time.perf_counter(), []
        for ask in asks:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            running.append(asyncio.create_task(self.ask(ask, due_s)))
            due_s += dice.expovariate(rate)
        return list(await asyncio.gather(*running))

    async def ask(self, ask: Ask, due_s: float) -> Sample:
        """Send one request and read its answer to the end."""
        sample = Sample(due_s)
        try:
            async with asyncio.timeout(self.timeout_s):
                sample.outcome = await self._read(ask, sample)
        except TimeoutError:
            sample.outcome = TIMEOUT
        except httpx2.TransportError:
            sample.outcome = LOST
        except ValueError:  # what should be JSON is not
            sample.outcome = BROKEN
        sample.end_s = time.perf_counter()
        self.on_sample(sample)
        return sample

    async def _read(self, ask: Ask, sample: Sample) -> str:
        path = self.dialect.path if self.is_streamed else self.dialect.whole_path
        body = merged(self.dialect.body(self.model, ask, self.is_streamed), self.extra)
        async with self.client.stream("POST", path.format(model=self.model), json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return str(response.status_code)
            if not self.is_streamed:
                sample.num_reported = _reported(self.dialect, orjson.loads(await response.aread()))
                return "200"
            has_end = False
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not data.startswith("{"):  # an empty line, a comment, a field of SSE, [DONE]
                    continue
                event = orjson.loads(data)
                if event.get("error") or (event.get("details") or {}).get("finish_reason") == "error":
                    return BROKEN
                if self.dialect.text_of(event):
                    sample.times_s.append(time.perf_counter())
                sample.num_reported = _reported(self.dialect, event) or sample.num_reported
                has_end |= self.dialect.is_end(event)
        return "200" if has_end else BROKEN


def _reported(dialect: Dialect, answer: Any) -> int | None:
    return dialect.num_tokens_of(answer[0] if isinstance(answer, list) else answer)


def merged(body: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return the body with further fields; objects in it, such as `parameters`, are merged too."""
    both = {name: body[name] | extra[name] for name in extra if isinstance(body.get(name), dict)}
    return body | extra | both


async def first_model(client: httpx2.AsyncClient) -> str:
    """Return the first model of the server. Raises ClickException if it does not list any."""
    try:
        response = await client.get("/v1/models")
        return str(orjson.loads(response.raise_for_status().content)["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        raise click.ClickException(f"{client.base_url}: no list at /v1/models ({error}): name a --model") from None
