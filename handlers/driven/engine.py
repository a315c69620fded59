"""A foreign engine, as a `DrivenExecutor` sees it."""

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from handlers.base.adapters import AdapterEngine
from handlers.base.sequence import Sequence
from handlers.driven.outputs import SequenceOutput
from lmi.executor import KvCacheStats

Work_contra = TypeVar("Work_contra", contravariant=True)


@dataclass(slots=True)
class EngineLoad:
    """How busy an engine is."""

    # The ids of the sequences that run, or their number if only that is known, or how many may
    # run.
    running: list[str] | int = 0
    # The number since the start.
    num_preemptions: int = 0
    kv_cache: KvCacheStats = field(default_factory=KvCacheStats)


class Engine(AdapterEngine, Protocol[Work_contra]):
    """A foreign engine. One thread uses it; any thread may use `wake` and `is_alive`. `name_of`
    makes the ids.
    """

    def add(self, work: Work_contra) -> None:
        """Queue a sequence. May raise what the engine's check of it raises."""

    def abort(self, ids: Iterable[str]) -> None:
        """Forget sequences; ids that have ended are ignored."""

    def step(self) -> SequenceOf[SequenceOutput] | None:
        """The outputs of a step, or None if none was made. Raises EngineStopped, or the step's own
        error.
        """

    def load(self) -> EngineLoad:
        """Return how busy it is."""

    def wake(self) -> None:
        """Make a `step` that waits for another process return."""

    @property
    def is_alive(self) -> bool:
        """False once a process that the engine needs has ended, even if no sequence runs."""

    def close(self) -> None:
        """End it. Nothing is called after this."""


def name_of(sequence: Sequence) -> str:
    """The id of a sequence at the engine."""
    return f"{sequence.id}.{sequence.index}"
