"""The folder of the models that should be loaded, where several come and go."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import suppress

import msgspec

from lmi.shared.desired_state import Folder, Model, State, check_name, is_abandoned

MAX_FAILED = 64  # entries that only say why a load failed


class ModelFolder(Folder[Model]):
    """The models. Its changes are exact however many processes ask at once.

    A front end writes an entry when a client asks for a model, marks it READY when the model can be used, and removes
    it when a client asks for that. The supervisor only reads: it starts the processes of each entry, and ends them when
    the entry is gone, is FAILED, or its writer died before it was done. So the entry says what should be, and the
    shared block of the model says what is.
    """

    def register(self, make: Callable[[list[Model]], Model]) -> Model:
        """Write the entry that `make` returns for those that there are, unless it raises."""
        with self._lock():
            others = self.entries()
            entry = make(others)
            check_name(entry.name)
            self._write(entry)
            failed = [each.name for each in others if each.state is State.FAILED and each.name != entry.name]
            for file in sorted(map(self._file, failed), key=lambda file: file.stat().st_mtime_ns)[:-MAX_FAILED]:
                file.unlink(missing_ok=True)
        return entry

    def settle(self, entry: Model, state: State, reason: str = "", cause: str = "") -> bool:
        """Change the state of an entry. Returns False if it is no longer there."""
        with self._lock():
            is_there = self.holds(entry)
            if is_there:
                self._write(msgspec.structs.replace(entry, state=state, reason=reason, cause=cause))
        return is_there

    def take(self, name: str) -> Model | None:
        """Remove the entry of this name and return it. Returns None if there is none."""
        with self._lock():
            entry = self.read(name)
            if entry is not None:
                self._file(name).unlink(missing_ok=True)
        return None if entry is None or is_abandoned(entry) else entry

    def withdraw(self, entry: Model) -> None:
        """Remove an entry, unless another one has taken its name."""
        with self._lock():
            if self.holds(entry):
                self._file(entry.name).unlink(missing_ok=True)

    def sweep(self) -> list[Model]:
        """Remove the entries whose writer died before it was done, and return them. Never waits for the lock."""
        removed = []
        with suppress(OSError), open(self._path / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in self._path.glob("*.json"):
                entry = self._read(path)
                if entry is not None and is_abandoned(entry):
                    path.unlink(missing_ok=True)
                    removed.append(entry)
        return removed

    def holds(self, entry: Model) -> bool:
        """Return whether the entry is there, perhaps in another state."""
        found = self.read(entry.name)
        return found is not None and found.folder == entry.folder
