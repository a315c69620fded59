"""The load: what clients ask a server, in a closed or an open loop, and what each of them saw."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import httpx2
import orjson

from lmi.client import answers
from lmi.client.bench.cpu import cpu_of
from lmi.client.bench.dialects import Ask, Dialect

# The outcomes of requests that have no whole answer.
LOST = "lost"
TIMEOUT = "timeout"
BROKEN = "broken"


@dataclass
class Sample:
    """One request. Times are seconds of `time.perf_counter`; `due_s` is when its client wanted to
    send it.
    """

    due_s: float
    end_s: float = 0.0
    # The status, or why there is no whole answer.
    outcome: str = ""
    # The times of the events with text.
    times_s: list[float] = field(default_factory=list)
    # The number of tokens that the server reported.
    num_reported: int | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the answer came whole."""
        return self.outcome == "200"

    @property
    def num_tokens(self) -> int:
        """The number of tokens, by the server's report or else by the events with text."""
        return len(self.times_s) if self.num_reported is None else self.num_reported

    @property
    def latencies_s(self) -> dict[str, list[float]]:
        """The times to the first token, between tokens and to the end, as far as there are some."""
        first_s: list[float] = []
        if self.times_s:
            first_s.append(self.times_s[0] - self.due_s)

        gaps_s = [after - before for before, after in itertools.pairwise(self.times_s)]
        end_s = [self.end_s - self.due_s]
        return {"first_s": first_s, "gap_s": gaps_s, "end_s": end_s}


@dataclass
class Load:
    """How to ask one server, and what came of each round. A load is open if it has a rate, else
    closed.
    """

    url: str
    client: httpx2.AsyncClient
    dialect: Dialect
    model: str
    is_streamed: bool = True
    num_streams: int = 8
    # In requests per second.
    rate: float | None = None
    timeout_s: float = 600.0
    # Further fields of each body.
    extra: dict[str, Any] = field(default_factory=dict)
    # All that have ended, also those of the warm-up, and of the round that runs.
    ended: list[Sample] = field(default_factory=list)
    # Those that have not ended, by their ids in Python.
    running: dict[int, Sample] = field(default_factory=dict)
    rounds: list[list[Sample]] = field(default_factory=list)
    # What its processes used in the rounds, if it is on this machine.
    cpu_s: dict[str, float] = field(default_factory=dict)

    async def round(self, asks: Sequence[Ask], seed: int) -> None:
        """Run a round, and note its samples and what CPU the server used meanwhile."""
        before_s = cpu_of(self.url)
        samples = await self.run(iter(asks), seed)
        after_s = cpu_of(self.url)

        self.rounds.append(samples)
        for process, seconds in after_s.items():
            used_s = seconds - before_s.get(process, 0.0)
            self.cpu_s[process] = self.cpu_s.get(process, 0.0) + used_s

    async def run(self, asks: Iterator[Ask], seed: int = 0) -> list[Sample]:
        """Ask until `asks` ends. `seed` is that of the times at which an open load asks."""
        if self.rate is None:
            return await self._closed(asks)

        return await self._open(asks, self.rate, seed)

    async def _closed(self, asks: Iterator[Ask]) -> list[Sample]:
        """Each stream asks again when it has its answer."""

        async def stream() -> list[Sample]:
            return [await self.ask(ask, time.perf_counter()) for ask in asks]

        streams = [stream() for _ in range(self.num_streams)]
        samples_of_streams = await asyncio.gather(*streams)
        return list(itertools.chain.from_iterable(samples_of_streams))

    async def _open(self, asks: Iterator[Ask], rate: float, seed: int) -> list[Sample]:
        """Requests come as a Poisson process does, whatever became of those before."""
        dice = random.Random(seed)
        due_s = time.perf_counter()
        running = []
        for ask in asks:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            running.append(asyncio.create_task(self.ask(ask, due_s)))
            due_s += dice.expovariate(rate)

        return list(await asyncio.gather(*running))

    async def ask(self, ask: Ask, due_s: float) -> Sample:
        """Send a request that was due at this time, and note what came of it."""
        sample = Sample(due_s)
        self.running[id(sample)] = sample
        try:
            async with asyncio.timeout(self.timeout_s):
                sample.outcome = await self._read(ask, sample)
        except TimeoutError:
            sample.outcome = TIMEOUT
        except httpx2.TransportError:
            sample.outcome = LOST
        except (ValueError, TypeError, AttributeError, LookupError, httpx2.DecodingError):
            # The answer has another form.
            sample.outcome = BROKEN
        finally:
            del self.running[id(sample)]

        sample.end_s = time.perf_counter()
        self.ended.append(sample)
        return sample

    async def _read(self, ask: Ask, sample: Sample) -> str:
        """Send a request and read its answer into the sample. Returns the outcome."""
        path = self.dialect.path if self.is_streamed else self.dialect.whole_path
        url = path.format(model=self.model)
        plain_body = self.dialect.body(self.model, ask, self.is_streamed)
        body = merged(plain_body, self.extra)

        async with self.client.stream("POST", url, json=body) as response:
            is_success = response.status_code == 200
            if self.is_streamed and is_success:
                return await self._read_stream(response, sample)

            return await self._read_whole(response, sample)

    async def _read_whole(self, response: httpx2.Response, sample: Sample) -> str:
        is_success = response.status_code == 200
        answer = await answers.whole_of_async(response.aiter_bytes(), is_success)
        if is_success:
            sample.num_reported = _reported(self.dialect, orjson.loads(answer))

        return str(response.status_code)

    async def _read_stream(self, response: httpx2.Response, sample: Sample) -> str:
        has_end = False
        async for line in answers.lines_of_async(response.aiter_bytes()):
            data = line.removeprefix(b"data:").strip()
            if not data.startswith(b"{"):
                # It is an empty line, a comment, a field of SSE, or [DONE].
                continue

            event = orjson.loads(data)
            details = event.get("details") or {}
            if event.get("error") or details.get("finish_reason") == "error":
                return BROKEN

            if self.dialect.text_of(event):
                sample.times_s.append(time.perf_counter())

            sample.num_reported = _reported(self.dialect, event) or sample.num_reported
            has_end |= self.dialect.ends_answer(event)

        return "200" if has_end else BROKEN


def _reported(dialect: Dialect, answer: Any) -> int | None:
    """Return the number of tokens that an answer reports, which TGI has in a list of one."""
    if isinstance(answer, list):
        answer = answer[0]

    return dialect.num_tokens_of(answer)


def merged(body: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return the body with further fields; objects in it, such as `parameters`, are merged too."""
    merged_objects = {}
    for name, value in extra.items():
        if isinstance(body.get(name), dict):
            merged_objects[name] = body[name] | value

    return body | extra | merged_objects


async def first_model(client: httpx2.AsyncClient) -> str:
    """Return the first model of the server. Raises ClickException if it does not list any."""
    try:
        async with client.stream("GET", "/v1/models") as response:
            response.raise_for_status()
            body = await answers.whole_of_async(response.aiter_bytes(), is_success=True)
            return answers.first_model_of(body)
    except (httpx2.HTTPError, ValueError) as error:
        raise click.ClickException(
            f"{client.base_url}: no list at /v1/models ({error}): name a --model"
        ) from None


def client_of(url: str, headers: dict[str, str]) -> httpx2.AsyncClient:
    """Return a client that goes through no proxy; SSL_CERT_FILE counts, as it does for
    `lmi chat`.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    trusted = httpx2.create_ssl_context()
    base = url.rstrip("/").removesuffix("/v1")
    return httpx2.AsyncClient(
        base_url=base, headers=headers, timeout=None, limits=limits, verify=trusted, trust_env=False
    )
