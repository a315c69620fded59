"""The LoRA adapters of the embedded engine: loaded by name, read off the step loop, and admitted to a batch.

The running sequences use at most `option.max_loras` adapters together: a sequence with one more waits, and those behind
it too. With `option.max_cpu_loras` the weights that were used longest ago are dropped, and read again when needed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from handlers.base.adapters import Adapters, LoadedAdapter
from handlers.lmi_dist.lora import AnyLoader
from handlers.lmi_dist.operations import Adapter
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import LmiError, OutOfMemory, UnknownAdapter, is_out_of_memory
from lmi.executor import ErrorKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What came of reading a folder: weights, or None if only the configuration was read, or an error."""

    weights: Adapter[Any] | None = None
    error: Exception | None = None


class LoraAdapters(Adapters):
    """The loaded adapters, and the engine that they are loaded into. Any thread may also use `prepare`."""

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(self, "lmi-dist", loader.limits.max_in_batch, _kind_of)
        self._loader, self._limits = loader, loader.limits
        self._resident: OrderedDict[int, LoadedAdapter] = OrderedDict()  # by number; the one used longest ago first
        self._prepared = Prepared()
        self._refused: list[EmbeddedSequence] = []

    def prepare(self, path: str, *, with_weights: bool) -> Prepared:
        """Read a folder while the engine makes steps."""
        try:
            if with_weights:
                return Prepared(self._loader.read(path))
            self._loader.check(path)
        except Exception as error:  # `load` raises it, unless the name is at fault
            return Prepared(error=error)
        return Prepared()

    def load_prepared(self, name: str, path: str, prepared: Prepared, *, pinned: bool, preload: bool) -> None:
        """Load an adapter whose folder was read. Raises what `load` raises."""
        self._prepared = prepared
        try:
            self.load(name, path, pinned=pinned, preload=preload)
        finally:
            self._prepared = Prepared()
        newest = list(self._resident)[-1:]
        self._evict(self.in_use.union(newest))

    def admit(self, sequence: EmbeddedSequence) -> bool:
        """Keep the adapter of a new sequence until `release`. If it was unloaded, the sequence fails."""
        try:
            adapter = self.claim(sequence)
        except UnknownAdapter as error:
            sequence.fail(error.message, ErrorKind.INVALID, error.field)
            return False
        sequence.adapter = 0 if adapter is None else adapter.number
        return True

    def may_run(self, sequence: EmbeddedSequence, running: SequenceOf[EmbeddedSequence]) -> bool:
        """Whether a sequence may run beside others; its adapter's weights are there then.

        If they cannot be read, the sequence fails, and `take_refused` gives it.
        """
        used = {one.adapter for one in running} - {0}
        if not sequence.adapter or sequence.adapter in used:
            return True
        if sequence.is_finished or len(used) >= self._limits.max_in_batch:
            return False
        try:
            self.used_by(sequence)
        except LmiError as error:
            log.error("the adapter of request %d cannot be used: %s", sequence.id, error)
            sequence.fail(error.message, _kind_of(error), error.field)
            self._refused.append(sequence)
            return False
        self._resident.move_to_end(sequence.adapter)
        self._evict(used | {sequence.adapter})
        return True

    def take_refused(self) -> list[EmbeddedSequence]:
        """The sequences that failed since the last call because their adapters could not be read."""
        refused, self._refused = self._refused, []
        return refused

    def _evict(self, used: set[int]) -> None:
        """Drop the weights that were used longest ago, as far as memory has a limit."""
        num_over = len(self._resident) - (self._limits.max_in_memory or len(self._resident))
        idle = [one for one in self._resident.values() if one.number not in used and not one.is_pinned]
        for adapter in idle[: max(num_over, 0)]:
            self.remove_adapter(adapter)
            self.forget_weights(adapter)

    # What `Adapters` calls.

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        if self._prepared.error is not None:
            raise self._prepared.error

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        if adapter.number not in self._resident:
            self._loader.model.put_adapter(adapter.number, self._prepared.weights or self._loader.read(adapter.path))
        self._resident[adapter.number] = adapter

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self._resident.pop(adapter.number, None)
        self._loader.model.drop_adapter(adapter.number)


def _kind_of(error: Exception) -> ErrorKind:
    is_full = isinstance(error, OutOfMemory) or is_out_of_memory(error)
    return ErrorKind.OUT_OF_MEMORY if is_full else ErrorKind.GENERATION
