"""The checks of guides for an engine that compiles them itself, without limits. Each guide is checked once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from handlers.base.guide_compiler import GuideCompiler, Kept, may_change
from handlers.base.guide_process import MAX_COMPILATIONS
from handlers.base.guide_turns import GuideTurns
from lmi.executor import GuidedDecodingParams

MAX_KEPT = 256  # outcomes
MAX_KEPT_CHARS = 32 << 20  # of their guides

T = TypeVar("T")


class GuideOutcomes(Generic[T]):
    """What `check` returned for a guide, or raised. One thread asks; `check` runs on others."""

    def __init__(
        self,
        compiler: GuideCompiler,
        check: Callable[[GuidedDecodingParams], T],
        max_kept: int = MAX_KEPT,
        max_kept_chars: int = MAX_KEPT_CHARS,
    ) -> None:
        self.num_compiled = 0
        self._compiler = compiler
        self._check = check
        self._turns: GuideTurns[T] = GuideTurns(MAX_COMPILATIONS)
        self._kept = Kept[Future[T]](max_kept, max_kept_chars)

    def of(self, params: GuidedDecodingParams, client: int | None = None) -> Future[T]:
        """The outcome of a guide's check, which begins now if there was none, or one that may end otherwise."""
        future, check = self._kept.get(params), partial(self._check, params)
        if future is None or (future.done() and (future.cancelled() or may_change(future.exception()))):
            self.num_compiled += 1
            future = self._turns.submit(client, check)
            self._kept.put(params, future)
        elif not (future.running() or future.done()):
            self._turns.submit(client, check, future)
        return future

    def close(self) -> None:
        self._turns.close()
        self._compiler.close()
