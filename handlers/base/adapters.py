"""LoRA adapters of a foreign engine by name, and turns for an engine that cannot mix them with the base model.

Every adapter is loaded before a request may name it, so a request never makes the engine read a file that it has not
read before. The number by which the engine knows an adapter is never used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from handlers.base.sequence import Sequence
from lmi.capabilities import unknown_adapter
from lmi.errors import InvalidParameter, LmiError, ModelUnusable, OutOfMemory, cause_line
from lmi.executor import Request

FOLDER = "adapters"  # beside the model's weights, one folder for each adapter, named after it


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    name: str
    number: int
    path: str
    is_pinned: bool = False


class AdapterEngine(Protocol):
    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Load an adapter, or raise an error that names the reason and leaves the engine unharmed."""

    def remove_adapter(self, adapter: LoadedAdapter) -> None: ...


class Adapters:
    """The loaded adapters. `load` and `unload` belong to the engine's thread; any thread may call the rest.

    `max_resident` is the number of adapters that one batch can use.
    """

    def __init__(self, engine: AdapterEngine, title: str, max_resident: int) -> None:
        self._engine = engine
        self._title = title  # of the engine, for messages
        self._max_resident = max_resident
        self._loaded: dict[str, LoadedAdapter] = {}
        self._numbers = count(1)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._loaded.copy()))

    def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load an adapter from a folder.

        Raises InvalidParameter for the name, OutOfMemory if the adapter does not fit, ModelUnusable with the reason.
        """
        if not isinstance(name, str) or not name or name in self._loaded:
            raise InvalidParameter("lora_config", "a new name, or unloaded first", name)
        if not (Path(path) / "adapter_config.json").is_file():
            raise ModelUnusable(f"{path}: an adapter's folder has an adapter_config.json")
        adapter = LoadedAdapter(name, next(self._numbers), str(path), pinned)
        self._check_room(adapter)
        try:
            self._engine.add_adapter(adapter)
        except LmiError:
            raise
        except Exception as error:
            self._engine.remove_adapter(adapter)  # it may be loaded in part
            raise ModelUnusable(f"{path}: {self._title} cannot load this adapter: {cause_line(error)}") from error
        self._loaded[name] = adapter

    def _check_room(self, new: LoadedAdapter) -> None:
        """Raise OutOfMemory unless each pinned adapter has a place and the others share at least one."""
        adapters = [*self._loaded.values(), new]
        num_pinned = sum(adapter.is_pinned for adapter in adapters)
        if num_pinned + (num_pinned < len(adapters)) > self._max_resident:
            raise OutOfMemory(f"{self._max_resident} adapters fit into a batch, and the pinned ones take all places")

    def load_all(self, model: str) -> None:
        """Load the adapters that lie beside the model."""
        for config in sorted(Path(model).glob(f"{FOLDER}/*/adapter_config.json")):
            self.load(config.parent.name, str(config.parent))

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that run with it finish. Raises UnknownAdapter."""
        if name not in self._loaded:
            raise unknown_adapter(name, self.names)
        self._engine.remove_adapter(self._loaded.pop(name))

    def used_by(self, request: Request) -> LoadedAdapter | None:
        """The adapter that a request names. Raises UnknownAdapter if it was unloaded after the request was accepted."""
        if request.lora_config is None:
            return None
        if request.lora_config.name not in self._loaded:
            raise unknown_adapter(request.lora_config.name, self.names)
        return self._loaded[request.lora_config.name]


class AdapterTurns:
    """The waiting sequences, in order of arrival. Each is given out once it may run beside the running ones.

    Some engines compute wrong rows for the base model in a batch that also uses an adapter. In those the two take
    turns. No sequence overtakes another, so none starves.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.waiting: deque[Sequence] = deque()
        self._is_needed = is_needed

    def take(self, running: dict[str, Sequence]) -> Iterator[Sequence]:
        """Yield the next sequences. The caller adds each to `running`, or fails it, before it asks for the next."""
        while self.waiting and self._may_run(self.waiting[0], running):
            yield self.waiting.popleft()

    def _may_run(self, sequence: Sequence, running: dict[str, Sequence]) -> bool:
        if not self._is_needed or not running:
            return True
        other = next(iter(running.values()))
        return (sequence.request.lora_config is None) == (other.request.lora_config is None)
