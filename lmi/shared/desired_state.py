"""The models and adapters that should be loaded, as files that every process of the server may write and read.

A file is renamed into place, so a reader sees an old entry or a new one. Names come from clients, so a file is named by
a hash. An entry is PENDING while its writer works on it, and does not count if that process is dead.
"""

import enum
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from lmi.errors import InvalidParameter
from lmi.shared.linux import write_whole

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:-]{0,255}"
NAME_RULE = "1 to 256 letters, digits and . _ : -, with a letter or digit first"

log = logging.getLogger(__name__)


class State(enum.StrEnum):
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: State
    writer: int = msgspec.field(default_factory=os.getpid)


T = TypeVar("T", bound=Entry)
Version = frozenset[tuple[str, int, int]]


class Folder(Generic[T]):
    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._reported: Version = frozenset()  # of unreadable files that were logged

    def add(self, entry: T) -> bool:
        """Write an entry. Returns False if another entry has its name. Raises InvalidParameter for a bad name."""
        return self.change(entry.name, lambda other: entry if other is None or is_abandoned(other) else other) is entry

    def replace(self, entry: T) -> None:
        self.change(entry.name, lambda old: entry)

    def swap(self, old: T, new: T) -> bool:
        """Replace an entry. Returns False if it is no longer as `old` says."""
        return self.change(old.name, lambda found: new if found == old else found) is new

    def remove(self, name: str) -> T | None:
        """Remove the entry of this name. Returns it, or None if no entry has the name."""
        with self.lock():
            old = self.read(name)
            self._file(name).unlink(missing_ok=True)
        return old

    def change(self, name: str, make: Callable[[T | None], T | None]) -> T | None:
        """Put what `make` returns in place of the entry of this name, where None is no entry. Returns the new one."""
        with self.lock():
            old = self.read(name)
            new = make(old)
            if new is None:
                self._file(name).unlink(missing_ok=True)
            elif new is not old:
                check_name(name)
                write_whole(self._file(name), msgspec.json.encode(new))
        return new

    def read(self, name: str) -> T | None:
        return self._read(self._file(name))

    def entries(self) -> list[T]:
        """Return all readable entries, sorted by name. An unreadable file is logged once and left out."""
        found = (self._read(Path(self._path, file)) for file, _, _ in self.version())
        counted = [entry for entry in found if entry is not None and not is_abandoned(entry)]
        return sorted(counted, key=lambda entry: entry.name)

    def version(self) -> Version:
        """Return a value that differs after every change of the folder."""
        found = set()
        with suppress(FileNotFoundError), os.scandir(self._path) as files:
            for file in files:
                if file.name.endswith(".json"):
                    with suppress(FileNotFoundError):  # removed since the folder was listed
                        found.add((file.name, file.stat().st_ino, file.stat().st_mtime_ns))
        return frozenset(found)

    def _file(self, name: str) -> Path:
        return self._path / f"{key(name)}.json"

    def _read(self, file: Path) -> T | None:
        try:
            return self._decoder.decode(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            unreadable = {entry for entry in self.version() if entry[0] == file.name}
            if not unreadable <= self._reported:
                log.error("%s cannot be read and is left out: %s", file, error)
            self._reported |= unreadable
            return None

    @contextmanager
    def lock(self, flags: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Hold the folder's lock, which one process has at a time. The kernel frees it when that process ends."""
        self._path.mkdir(parents=True, exist_ok=True)
        with open(self._path / "lock", "wb") as file:
            fcntl.flock(file, flags)
            yield


def key(name: str) -> str:
    """Return the part of a path that identifies a name from outside."""
    return hashlib.sha256(name.encode()).hexdigest()


def check_name(name: str, parameter: str = "name") -> None:
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidParameter(parameter, NAME_RULE, name)


def is_abandoned(entry: Entry) -> bool:
    """Return whether the entry's writer died before it was done."""
    return entry.state is State.PENDING and not Path(f"/proc/{entry.writer}").exists()
