"""The LoRA adapters of an engine, by name.

A request may name an adapter once it is loaded. Its weights are read then, or for its first request
if the load does not ask for them. An unloaded adapter stays until the last sequence ends that uses
it. The engine knows each adapter by a number that no other adapter ever has.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from handlers.base.token_sequence import TokenSequence
from lmi.adapters.files import CONFIG
from lmi.capabilities import unknown_adapter
from lmi.errors import InvalidParameter, LmiError, ModelUnusable, OutOfMemory, cause_line
from lmi.executor import ErrorKind


class LoadedAdapter(Struct, frozen=True):
    """An adapter that requests may name."""

    name: str
    number: int
    path: str
    is_pinned: bool = False


class AdapterEngine(Protocol):
    """What reads the weights of adapters for `Adapters`."""

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        """Read the configuration of an adapter. Raises an error that names the reason if it does
        not fit.
        """

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Read the weights of an adapter unless it has them, and pin it if it is to be pinned.

        Raises an error that names the reason and leaves the engine unharmed.
        """

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """Free the weights of an adapter, if it has them."""


class Adapters:
    """The loaded adapters, and which sequences use them.

    Any thread may read `names` and `is_reading`. All else belongs to the engine's thread.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        title: str,
        max_resident: int,
        kind_of: Callable[[Exception], ErrorKind],
    ) -> None:
        """`title` is the name of the engine in messages.

        `max_resident`: how many adapters one batch can use. `kind_of` gives the kind of an error
        that the engine has raised.
        """
        # While it reads weights, the engine makes no step.
        self.is_reading = False
        self._engine = engine
        self._title = title
        self._max_resident = max_resident
        self._kind_of = kind_of

        # By name.
        self._loaded: dict[str, LoadedAdapter] = {}
        # By number: adapters that were unloaded and that sequences still use.
        self._leaving: dict[int, LoadedAdapter] = {}
        # By sequence: what it uses, also while it waits.
        self._used: dict[TokenSequence, LoadedAdapter] = {}
        # By number: adapters whose weights were read.
        self._resident: OrderedDict[int, LoadedAdapter] = OrderedDict()
        self._numbers = count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the loaded adapters, sorted."""
        return tuple(sorted(self._loaded.copy()))

    def name_of(self, number: int) -> str | None:
        """Return the name of an adapter that is loaded or used, by its number."""
        for adapter in (*self._loaded.values(), *self._leaving.values()):
            if adapter.number == number:
                return adapter.name

        return None

    @property
    def in_use(self) -> set[int]:
        """The numbers of the adapters of all sequences, also of those that wait."""
        return {adapter.number for adapter in self._used.values()}

    def load(self, name: str, path: str, *, pinned: bool = False, preload: bool = True) -> None:
        """Load an adapter from a folder, or give a loaded adapter of this folder the new settings.

        Raises InvalidParameter for the name, OutOfMemory if the adapter does not fit, ModelUnusable
        with the reason.
        """
        loaded = self._loaded.get(name)
        is_name = isinstance(name, str) and name
        if not is_name or (loaded is not None and loaded.path != str(path)):
            raise InvalidParameter("lora_config", "a new name, or unloaded first", name)

        if not (Path(path) / CONFIG).is_file():
            raise ModelUnusable(f"{path}: an adapter's folder has an {CONFIG}")

        adapter = loaded or LoadedAdapter(name, next(self._numbers), str(path))
        if pinned:
            adapter = replace(adapter, is_pinned=True)

        self._check_room(adapter)
        self._ask_engine(self._engine.check_adapter, adapter)
        if preload or pinned:
            self._read(adapter)

        self._loaded[name] = adapter

    def _check_room(self, new: LoadedAdapter) -> None:
        """Raise OutOfMemory unless each pinned adapter has a place and the others share at least
        one.
        """
        loaded = self._loaded | {new.name: new}
        adapters = [*loaded.values(), *self._leaving.values()]
        num_pinned = sum(adapter.is_pinned for adapter in adapters)
        num_places = num_pinned
        if num_pinned < len(adapters):
            num_places += 1

        if num_places > self._max_resident:
            raise OutOfMemory(
                f"{self._max_resident} adapters fit into a batch, and the pinned ones take all "
                f"places"
            )

    def _read(self, adapter: LoadedAdapter) -> None:
        """Let the engine read the weights of an adapter. Raises OutOfMemory or ModelUnusable."""
        self.is_reading = True
        try:
            self._ask_engine(self._engine.add_adapter, adapter)
        except LmiError:
            if adapter.number not in self._resident:
                # The engine may have read a part of it.
                self._engine.remove_adapter(adapter)

            raise
        finally:
            self.is_reading = False

        self._resident[adapter.number] = adapter

    def _ask_engine(self, method: Callable[[LoadedAdapter], None], adapter: LoadedAdapter) -> None:
        """Call a method of the engine. Its errors become OutOfMemory or ModelUnusable."""
        try:
            method(adapter)
        except LmiError:
            raise
        except Exception as error:
            reason = f"{adapter.path}: {self._title} cannot load this adapter: {cause_line(error)}"
            if self._kind_of(error) is ErrorKind.OUT_OF_MEMORY:
                raise OutOfMemory(reason) from error

            raise ModelUnusable(reason) from error

    def unload(self, name: str) -> None:
        """Unload an adapter. The engine keeps it until the last sequence ends that uses it. Raises
        UnknownAdapter.
        """
        if name not in self._loaded:
            raise unknown_adapter(name)

        adapter = self._loaded.pop(name)
        self._leaving[adapter.number] = adapter
        self._remove_unused(adapter.number)

    def claim(self, sequence: TokenSequence) -> LoadedAdapter | None:
        """Keep the adapter that a new sequence names until `release`. Raises UnknownAdapter if it
        was unloaded.
        """
        lora = sequence.request.lora_config
        if lora is None:
            return None

        if lora.name not in self._loaded:
            raise unknown_adapter(lora.name)

        adapter = self._loaded[lora.name]
        self._used[sequence] = adapter
        return adapter

    def release(self, sequence: TokenSequence) -> None:
        """Let go of the adapter that a sequence has claimed, if it has one."""
        adapter = self._used.pop(sequence, None)
        if adapter is not None:
            self._remove_unused(adapter.number)

    def used_by(self, sequence: TokenSequence) -> LoadedAdapter | None:
        """The adapter of a sequence, with its weights. Raises what `load` raises for them."""
        adapter = self._used.get(sequence)
        if adapter is not None and adapter.number not in self._resident:
            self._read(adapter)

        return adapter

    def drop_weights(self, adapter: LoadedAdapter) -> None:
        """Free the weights of an adapter. If it is loaded, they are read again for its next
        sequence.
        """
        self._resident.pop(adapter.number, None)
        self._engine.remove_adapter(adapter)

    def _remove_unused(self, number: int) -> None:
        """Free an adapter that was unloaded, once no sequence uses it."""
        if number in self._leaving and number not in self.in_use:
            self.drop_weights(self._leaving.pop(number))
