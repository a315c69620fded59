"""The loaded LoRA adapters: read off the step loop, loaded by name, and admitted to a batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any, TypeAlias

from handlers.base.adapters import Adapters, LoadedAdapter
from handlers.lmi_dist.lora import AnyLoader
from handlers.lmi_dist.operations import Adapter
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import LmiError, OutOfMemory, UnknownAdapter, is_out_of_memory
from lmi.executor import ErrorKind

log = logging.getLogger(__name__)

Prepared: TypeAlias = "Future[Adapter[Any] | None]"
"""What came of reading a folder, which is over: weights, or None if they were only checked, or an
error.
"""


class LoraAdapters(Adapters):
    """The loaded adapters, and the engine that they are loaded into.

    Any thread may also use `prepare`.
    """

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(self, "lmi-dist", loader.limits.max_in_batch, _kind_of)
        self._loader = loader
        self._prepared: Prepared | None = None

    def prepare(self, path: str, *, with_weights: bool) -> Prepared:
        """Read a folder while the engine makes steps."""
        prepared: Prepared = Future()
        try:
            if not with_weights:
                self._loader.check(path)

            prepared.set_result(self._loader.read(path) if with_weights else None)
        except Exception as error:
            # `load` raises it, unless the name is at fault.
            prepared.set_exception(error)

        return prepared

    def load_prepared(
        self, name: str, path: str, prepared: Prepared, *, pinned: bool, preload: bool
    ) -> None:
        """Load an adapter whose folder was read. Raises what `load` raises."""
        self._prepared = prepared
        try:
            self.load(name, path, pinned=pinned, preload=preload)
        finally:
            self._prepared = None

        # The newest stays too.
        self._evict(self.in_use.union(list(self._resident)[-1:]))

    def admit(self, sequence: EmbeddedSequence) -> bool:
        """Keep the adapter of a new sequence until `release`.

        If it was unloaded, the sequence fails.
        """
        try:
            adapter = self.claim(sequence)
        except UnknownAdapter as error:
            sequence.fail(error.message, ErrorKind.INVALID, error.field)
            return False

        sequence.adapter = 0 if adapter is None else adapter.number
        return True

    def may_run(self, sequence: EmbeddedSequence, running: SequenceOf[EmbeddedSequence]) -> bool:
        """Whether a sequence may run beside others, with at most `option.max_loras` adapters
        together.

        Its adapter's weights are there then, or it fails.
        """
        used = {row.adapter for row in running} - {0}
        if not sequence.adapter or sequence.adapter in used:
            return True

        if sequence.is_finished or len(used) >= self._loader.limits.max_in_batch:
            return False

        try:
            self.used_by(sequence)
        except LmiError as error:
            log.error("the adapter of request %d cannot be used: %s", sequence.id, error)
            sequence.fail(error.message, _kind_of(error), error.field)
            return False

        # The one that was used longest ago is the first.
        self._resident.move_to_end(sequence.adapter)
        self._evict(used | {sequence.adapter})
        return True

    def _evict(self, used: set[int]) -> None:
        """Drop the weights that were used longest ago, as far as memory has a limit."""
        max_in_memory = self._loader.limits.max_in_memory or len(self._resident)
        num_over = max(len(self._resident) - max_in_memory, 0)
        idle: list[LoadedAdapter] = []
        for adapter in self._resident.values():
            if adapter.number not in used and not adapter.is_pinned:
                idle.append(adapter)

        for adapter in idle[:num_over]:
            self.drop_weights(adapter)

    # What `Adapters` calls.

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        """Raise what came of reading the adapter's folder, if it was wrong."""
        if self._prepared is not None:
            self._prepared.result()

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Give the model the weights of an adapter, unless it has them."""
        if adapter.number in self._resident:
            return

        weights = None if self._prepared is None else self._prepared.result()
        weights = weights or self._loader.read(adapter.path)
        self._loader.model.put_adapter(adapter.number, weights)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """Let the model forget the weights of an adapter."""
        self._loader.model.drop_adapter(adapter.number)


def _kind_of(error: Exception) -> ErrorKind:
    is_full = isinstance(error, OutOfMemory) or is_out_of_memory(error)
    return ErrorKind.OUT_OF_MEMORY if is_full else ErrorKind.GENERATION
