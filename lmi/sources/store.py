"""The place of one source of S3 below `download_dir`.

    H/model/…           the files, whole; H is sha256 of endpoint and URL
    H/manifest.jsonl    one line for each object: key, size, ETag and where it lies
    H.part/             the same two while it is filled; a line is written when its object is whole and checked
    H.lock              one process fills at a time

H.part is renamed to H when it is whole, so a process that dies at any moment leaves nothing that counts as whole, and
the next one keeps every object that has its line.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from lmi.sources.place import size_of

MODEL = "model"


class StoredObject(msgspec.Struct, frozen=True):
    """An object of S3, as the listing describes it."""

    key: str
    size: int
    etag: str
    path: str  # below H, such as model/config.json


class Store:
    def __init__(self, download_dir: Path, endpoint: str, url: str) -> None:
        name = hashlib.sha256(f"{endpoint} {url}".encode()).hexdigest()
        self.whole = download_dir / name
        self.part = download_dir / f"{name}.part"
        self.lock = download_dir / f"{name}.lock"
        self._old = download_dir / f"{name}.old"

    @property
    def model(self) -> Path:
        """The folder with the model's files."""
        return self.whole / MODEL

    def is_current(self, objects: Iterable[StoredObject], *, is_unpacked: bool = False) -> bool:
        """Return whether H holds exactly these objects. Those of an archive that was unpacked are gone."""
        listed = {each.key: each for each in objects}
        if _manifest(self.whole) != listed:
            return False
        return self.model.is_dir() if is_unpacked else all(_is_there(self.whole, each) for each in listed.values())

    def missing(self, objects: Iterable[StoredObject]) -> list[StoredObject]:
        """Prepare H.part with the objects that are known already. Returns those that must be fetched."""
        objects = list(objects)
        shutil.rmtree(self._old, ignore_errors=True)
        kept = {each.path: each for each in _held(self.part, objects)}
        _remove_others(self.part, kept)
        for each in _held(self.whole, objects):
            if each.path not in kept and _link(self.whole, self.part, each):
                kept[each.path] = each
        (self.part / MODEL).mkdir(parents=True, exist_ok=True)
        new = self.part / "manifest.new"
        new.write_bytes(b"".join(map(_line, kept.values())))
        new.rename(_manifest_of(self.part))
        return [each for each in objects if each.path not in kept]

    def record(self, fetched: StoredObject) -> None:
        """Note that an object is whole in H.part."""
        with open(_manifest_of(self.part), "ab") as file:
            file.write(_line(fetched))

    def finish(self) -> None:
        """Let H.part become H."""
        with suppress(FileNotFoundError):
            self.whole.rename(self._old)
        self.part.rename(self.whole)
        shutil.rmtree(self._old, ignore_errors=True)


def _manifest_of(folder: Path) -> Path:
    return folder / "manifest.jsonl"


def _line(each: StoredObject) -> bytes:
    return msgspec.json.encode(each) + b"\n"


def _manifest(folder: Path) -> dict[str, StoredObject]:
    """Return the noted objects by key. A line that a killed process did not end is left out."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for line in _manifest_of(folder).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                each = msgspec.json.decode(line, type=StoredObject)
                found[each.key] = each
    return found


def _held(folder: Path, objects: Iterable[StoredObject]) -> list[StoredObject]:
    """Return the objects that the folder has, noted and with their size."""
    noted = _manifest(folder)
    return [each for each in objects if noted.get(each.key) == each and _is_there(folder, each)]


def _is_there(folder: Path, each: StoredObject) -> bool:
    return size_of(folder / each.path) == each.size


def _link(source: Path, target: Path, each: StoredObject) -> bool:
    """Give a file of the earlier version a place in the new one. Returns False if the file system has no links."""
    path = target / each.path
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(source / each.path, path)
        return True
    return False


def _remove_others(folder: Path, kept: Iterable[str]) -> None:
    """Remove every file but the kept ones: parts of files, and objects that changed."""
    names = set(kept)
    for path in list(folder.rglob("*")):
        if not path.is_dir() and str(path.relative_to(folder)) not in names:
            path.unlink()
