"""The guides of clients, who take turns while theirs are compiled, and what came of those that were
used last.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from handlers.base.client_turns import ClientTurns
from handlers.guides.compiler import Compiled, GuideCompiler, TooSlow, Wait
from handlers.guides.process import MAX_COMPILATIONS
from lmi.errors import InvalidRequest
from lmi.executor import GuidedDecodingParams

# So many outcomes are kept.
MAX_KEPT = 256
# So many characters may their guides have.
MAX_KEPT_CHARS = 32 << 20

T = TypeVar("T")


class Kept(OrderedDict[GuidedDecodingParams, T]):
    """What came of the guides that were used last, up to a number of them and of their
    characters.
    """

    def __init__(self, max_num: int, max_chars: int) -> None:
        # The guide used longest ago comes first.
        super().__init__()
        self._max_num = max_num
        self._max_chars = max_chars

    @property
    def num_chars(self) -> int:
        """The characters of all guides together."""
        return sum(len(params.guide or "") for params in self)

    def put(self, params: GuidedDecodingParams, outcome: T) -> None:
        """Keep what came of a guide, which is now the one used last."""
        self[params] = outcome
        self.move_to_end(params)
        while len(self) > self._max_num or self.num_chars > self._max_chars:
            self.popitem(last=False)


class GuideFuture(Future[T]):
    """What comes of one guide, and the wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.wait = Wait()

    def give_up(self) -> None:
        """End its compilation, for which nobody waits any more."""
        self.cancel()
        self.wait.end()

    @property
    def may_change(self) -> bool:
        """Whether a second attempt to compile the guide may end otherwise."""
        if self.wait.is_over or self.cancelled():
            return True

        if not self.done():
            return False

        error = self.exception()
        if error is not None:
            return isinstance(error, TooSlow) or not isinstance(error, InvalidRequest)

        outcome = self.result()
        return isinstance(outcome, Compiled) and outcome.is_spent


class GuideOutcomes(Generic[T]):
    """What `make` returned for a guide, or raised. One thread asks; `make` runs on others, once for
    each guide.
    """

    def __init__(
        self,
        compiler: GuideCompiler,
        make: Callable[[GuidedDecodingParams, Wait], T],
        max_kept: int = MAX_KEPT,
        max_kept_chars: int = MAX_KEPT_CHARS,
    ) -> None:
        self.num_compiled = 0
        self._compiler = compiler
        self._make = make
        self._turns: ClientTurns[T] = ClientTurns(MAX_COMPILATIONS, "guides")
        self._kept = Kept[GuideFuture[T]](max_kept, max_kept_chars)

    def of(self, params: GuidedDecodingParams, client: int | None = None) -> GuideFuture[T]:
        """The outcome of a guide, which is made from now on if there was none, or one that may end
        otherwise.
        """
        future = self._kept.get(params)
        if future is None or future.may_change:
            self.num_compiled += 1
            future = GuideFuture()

        self._kept.put(params, future)
        if not (future.running() or future.done()):
            self._turns.submit(client, partial(self._make, params, future.wait), future)

        return future

    def close(self) -> None:
        """End the threads and the process that compiles."""
        self._turns.close()
        self._compiler.close()
