"""What the engine's thread sends to the objects that clients hold."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor


class Finish(Enum):
    NOT_FINISHED = auto()
    END_ID = auto()
    STOP_WORDS = auto()
    LENGTH = auto()
    CANCELLED = auto()


@dataclass
class Response:
    """News of one sequence, or of all beams of a request. Lists have an entry for each beam, or
    one.
    """

    index: int
    # New ones; all of them of a beam
    tokens: list[list[int]]
    reasons: list[Finish]
    is_final: bool  # of the request
    # Of all tokens so far
    log_probs: list[list[Any]] | None = None
    sums: list[float] | None = None
    # (num_rows, vocab) for each beam
    generation_logits: list[Tensor] | None = None
    context_logits: Tensor | None = None
    prompt_log_probs: list[Any] | None = None
    context_outputs: dict[str, Tensor] | None = None
    generation_outputs: dict[str, Tensor] | None = None
    perf_metrics: Any = None
    num_cached_tokens: int = 0


@dataclass
class Refusal:
    """The worker's error for one request."""

    message: str


@dataclass
class Death:
    """The end of the engine, which every open request is told."""

    error: Exception


News = Response | Refusal | Death


@dataclass
class Channel:
    """The way of one request's news. It serves async callers only if an event loop runs where it is
    made.
    """

    news: queue.SimpleQueue[News] = field(default_factory=queue.SimpleQueue)
    loop: asyncio.AbstractEventLoop | None = None
    has_news: asyncio.Event | None = None

    def __post_init__(self) -> None:
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            return

        self.has_news = asyncio.Event()

    async def aget(self) -> News:
        assert self.has_news is not None, (
            "The asyncio event loop was not present during initialization, so async operations are "
            "not available."
        )
        while self.news.empty():
            self.has_news.clear()
            await self.has_news.wait()

        return self.news.get_nowait()


def deliver(batch: Iterable[tuple[Channel, News]]) -> None:
    """Hand out the news of one step. The readers of one event loop get theirs in one turn of the
    loop.
    """
    news_of_loops: dict[asyncio.AbstractEventLoop, list[tuple[Channel, News]]] = {}
    for channel, news in batch:
        if channel.loop is None or channel.loop.is_closed():
            channel.news.put(news)
        else:
            news_of_loops.setdefault(channel.loop, []).append((channel, news))

    for loop, some in news_of_loops.items():
        loop.call_soon_threadsafe(_hand_out, some)


def _hand_out(told: list[tuple[Channel, News]]) -> None:
    for channel, news in told:
        channel.news.put(news)
        assert channel.has_news is not None
        channel.has_news.set()
