"""The models and adapters that should be loaded, as files that every process of the server may
write and read.

A file is renamed into place, so a reader sees an old entry or a new one. Names come from clients,
so a file is named by a hash. An entry is PENDING while its writer works on it, and does not count
if that process is dead. One that cannot be read now, as without a free descriptor or on a disk that
fails, is unknown and not removed: it counts as it did before.
"""

import enum
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from lmi.errors import InvalidParameter, Unavailable
from lmi.shared.files import write_whole

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:-]{0,255}"
NAME_RULE = "1 to 256 letters, digits and . _ : -, with a letter or digit first"

log = logging.getLogger(__name__)


class State(enum.StrEnum):
    """How far the writer of an entry is with it."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A model or an adapter that should be loaded, or will be."""

    name: str
    state: State
    # The id of the process that wrote the entry.
    writer: int = msgspec.field(default_factory=os.getpid)


T = TypeVar("T", bound=Entry)
Version = frozenset[tuple[str, int, int]]


class FolderListing(msgspec.Struct, Generic[T], frozen=True):
    """What one look at a folder found. The version is None if a part could not be read, which is
    worth another look.
    """

    # The entries that count, sorted by name.
    entries: list[T]
    version: Version | None


class Folder(Generic[T]):
    """The entries of one kind, as any process of the server reads and changes them."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        # As it was read last, by the name of the file.
        self._last_read: dict[str, T] = {}
        # Files that were reported.
        self._unreadable: set[str] = set()

    def add(self, entry: T) -> bool:
        """Write an entry. Returns False if another entry has its name. Raises InvalidParameter for
        a bad name.
        """

        def put(old: T | None) -> T:
            return entry if old is None or is_abandoned(old) else old

        return self.change(entry.name, put) is entry

    def replace(self, entry: T) -> None:
        """Write an entry in place of the one of its name, if there is one."""
        self.change(entry.name, lambda old: entry)

    def swap(self, old: T, new: T) -> bool:
        """Replace an entry. Returns False if it is no longer as `old` says."""

        def put(current: T | None) -> T | None:
            return new if current == old else current

        return self.change(old.name, put) is new

    def remove(self, name: str) -> T | None:
        """Remove the entry of this name. Returns it, or None if no entry has the name or nobody
        here ever read it.
        """
        with self.lock():
            old = self._read(self._file(name))
            self._unlink(self._file(name))

        return old

    def change(
        self, name: str, make: Callable[[T | None], T | None], flags: int = fcntl.LOCK_EX
    ) -> T | None:
        """Put what `make` returns in place of the entry of this name, where None is no entry.
        Returns the new one.

        An entry that cannot be read now and was never read here counts as none, so that a new one
        can take its place.
        """
        file = self._file(name)
        with self.lock(flags):
            old = self._read(file)
            new = make(old)
            if new is None:
                self._unlink(file)
            elif new is not old:
                check_name(name)
                write_whole(file, msgspec.json.encode(new))
                self._last_read[file.name] = new

        return new

    def read(self, name: str) -> T | None:
        """Return the entry of this name, as it was read last if it cannot be read now, or None.

        Raises Unavailable for one that cannot be read now and was never read here.
        """
        file = self._file(name)
        entry = self._read(file)
        if entry is None and file.name in self._unreadable:
            raise Unavailable(f"whether {name!r} is loaded here cannot be read now, see the log")

        return entry

    def entries(self) -> list[T]:
        """Return the entries that count, sorted by name. What cannot be read now is as `snapshot`
        says.
        """
        return self.snapshot().entries

    def snapshot(self) -> FolderListing[T]:
        """Look at the whole folder. What cannot be read now is as it was read last, or left out if
        it never was.
        """
        version = self.version()
        if version is None:
            return FolderListing(_counted(self._last_read.copy().values()), None)

        files = {file for file, _, _ in version}
        for file in set(self._last_read) - files:
            self._last_read.pop(file, None)

        self._unreadable.intersection_update(files)

        entries = [self._read(self._path / file) for file in files]
        is_whole = not self._unreadable & files
        whole_version = version if is_whole else None
        return FolderListing(
            _counted(entry for entry in entries if entry is not None), whole_version
        )

    def version(self) -> Version | None:
        """Return a value that differs after every change of the folder, or None if it cannot be
        listed now.
        """
        files = set[tuple[str, int, int]]()
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    if not entry.name.endswith(".json"):
                        continue

                    # It may have been removed since the folder was listed.
                    with suppress(FileNotFoundError):
                        files.add((entry.name, entry.stat().st_ino, entry.stat().st_mtime_ns))
        except FileNotFoundError:
            # Nothing was written yet.
            pass
        except OSError:
            return None

        return frozenset(files)

    def _file(self, name: str) -> Path:
        return self._path / f"{key(name)}.json"

    def _unlink(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        self._last_read.pop(file.name, None)
        self._unreadable.discard(file.name)

    def _read(self, file: Path) -> T | None:
        """Return what a file has, or had when it was read last, or None. One that cannot be read is
        logged once.
        """
        try:
            entry = self._decoder.decode(file.read_bytes())
        except FileNotFoundError:
            self._last_read.pop(file.name, None)
            self._unreadable.discard(file.name)
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            last = self._last_read.get(file.name)
            if file.name not in self._unreadable:
                self._unreadable.add(file.name)
                counts = "is left out" if last is None else "counts as it did before"
                log.error("%s cannot be read and %s: %s", file, counts, error)

            return last

        self._last_read[file.name] = entry
        self._unreadable.discard(file.name)
        return entry

    @contextmanager
    def lock(self, flags: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Hold the folder's lock, which one process has at a time. The kernel frees it when that
        process ends.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        with open(self._path / "lock", "wb") as file:
            fcntl.flock(file, flags)
            yield


def _counted(entries: Iterable[T]) -> list[T]:
    living = (entry for entry in entries if not is_abandoned(entry))
    return sorted(living, key=lambda entry: entry.name)


def key(name: str) -> str:
    """Return the part of a path that identifies a name from outside."""
    return hashlib.sha256(name.encode()).hexdigest()


def check_name(name: str, parameter: str = "name") -> None:
    """Raise InvalidParameter for a name against NAME_RULE."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidParameter(parameter, NAME_RULE, name)


def is_abandoned(entry: Entry) -> bool:
    """Return whether the entry's writer died before it was done."""
    return entry.state is State.PENDING and not Path(f"/proc/{entry.writer}").exists()
