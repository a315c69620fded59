"""The model store of a container: the models of one source, in folders as the container sees them.

A model that clients call KEY is a folder or an archive at SOURCE/KEY, where SOURCE is a folder or `s3://BUCKET/PREFIX`.
It is stored at `DIR/H/model`, where `H` is a hash of its place, because a key comes from clients and must not become a
path. A stamp beside it says from which files it was made. What comes from S3 is kept in `DIR/sources`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from lmi.errors import StartError, cause_line
from lmi.gateway.exchange import invalid
from lmi.gateway.stores import S3_SCHEME
from lmi.shared.fetches import WantedSource
from lmi.sources.archive import unpack
from lmi.sources.fetch import fetch
from lmi.sources.files import descended
from lmi.sources.job import FetchJob
from lmi.sources.place import Place
from lmi.sources.source import ARCHIVE_SUFFIXES

NAME_CHARS = 32


class LoadFailed(Exception):
    """A model cannot be stored or loaded. `status` is that of the container's response, or 0."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(f"{status}: {reason}" if status else reason)
        self.reason, self.status = reason, status


class ModelStore:
    """The models of `source` in `folder`, which the container sees too."""

    def __init__(self, source: str, folder: Path) -> None:
        self._folder = folder
        self._is_remote = source.startswith(S3_SCHEME)
        self._source = source.rstrip("/") if self._is_remote else str(Path(source).resolve())

    def name(self, key: str) -> str:
        """Return the name that the model has in the container. Raises AwsError for a key against the rule."""
        if not {"", ".", ".."}.isdisjoint(key.split("/")):  # other spellings of a key, which S3 does not have either
            raise invalid(f"TargetModel must be a relative path without empty parts, . and .., given {key}")
        return hashlib.sha256(f"{self._source}/{key}".encode()).hexdigest()[:NAME_CHARS]

    def add(self, key: str) -> tuple[Path, bool]:
        """Store a model, unless it is there. Returns its folder, and whether the container may have other files of it.

        Raises AwsError if the source has no such model, or LoadFailed. It blocks.
        """
        home = self._folder / self.name(key)
        place = Place(self._folder, "--models-dir")
        try:
            if self._is_remote:
                wanted = WantedSource(source=f"{self._source}/{key}", download_dir=str(self._folder / "sources"))
                found = Path(fetch(FetchJob(wanted)).folder)
            else:
                found = self._find(key)
            with place.only_one(home / "lock", key):  # of two gateways
                was_replaced = _update(found, home, lambda num_bytes: place.check_room(num_bytes, key))
            return home / "model", was_replaced
        except StartError as error:
            raise LoadFailed(f"TargetModel {key}: {error}") from error
        except OSError as error:
            raise LoadFailed(f"TargetModel {key} cannot be stored in {home}: {cause_line(error)}") from error

    def _find(self, key: str) -> Path:
        """Return the folder or archive. A link that leads out of the source counts as nothing."""
        source = Path(self._source)
        found = (source / key).resolve()
        if not found.is_relative_to(source) or not found.exists():
            raise invalid(f"TargetModel {key} is not below {source}")
        if not found.is_dir() and not found.name.endswith(ARCHIVE_SUFFIXES):
            raise invalid(f"TargetModel {key} is neither a folder nor one of {' '.join(ARCHIVE_SUFFIXES)}")
        if (link := _link_out_of(source, found)) is not None:
            raise LoadFailed(f"TargetModel {key}: the link {link.relative_to(found)} leads out of the source")
        return found


def _link_out_of(source: Path, found: Path) -> Path | None:
    """Return a link in a model's folder, or in a folder that it links to, that leads out of the source, if any does."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(found, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(source):
                return path
    return None


def _update(found: Path, home: Path, check_room: Callable[[int], None]) -> bool:
    """Make the model, unless it is there as it should be. Returns whether other files were there before."""
    stamp, model = home / "stamp.json", home / "model"
    files = sorted(path for path in found.rglob("*") if path.is_file()) if found.is_dir() else [found]
    wanted = json.dumps([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    if model.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return False
    part = home / "part"
    _remove(part)  # of a process that was killed
    try:
        made = _make(found, part, check_room)
        stamp.unlink(missing_ok=True)
        is_new = not model.exists()
        _remove(model)
        made.rename(model)
        stamp.write_text(wanted)
    finally:
        _remove(part)
    return not is_new


def _make(found: Path, folder: Path, check_room: Callable[[int], None]) -> Path:
    """Copy or unpack a model to a folder. Returns the folder with its files, which may be the only one in it."""
    if found.is_dir():
        shutil.copytree(found, folder, copy_function=_link_or_copy)
        return folder
    folder.mkdir()
    unpack(found, folder, check_room=check_room)
    return descended(folder)


def _link_or_copy(source: str, target: str) -> None:
    """Give a file a second name, which needs no room, or copy it to another disk."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
