"""The models of multi-model endpoints and of deployed containers, which are stored in a folder that
the container sees too.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lmi.errors import StartError, cause_line
from lmi.gateway.errors import invalid
from lmi.gateway.stores import S3_SCHEME
from lmi.sources.archive import unpack
from lmi.sources.fetch import fetch
from lmi.sources.fetches import WantedSource
from lmi.sources.job import FetchJob
from lmi.sources.place import Place
from lmi.sources.source import ARCHIVE_SUFFIXES, descended

# The characters of a model's name in the container.
NAME_CHARS = 32


class LoadFailed(Exception):
    """A model cannot be stored or loaded. `status` is that of the container's response, or 0."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(f"{status}: {reason}" if status else reason)
        self.reason = reason
        self.status = status


class StoredModel(NamedTuple):
    """A model as it is stored. With `was_replaced` the container may have other files of it."""

    folder: Path
    was_replaced: bool


class ModelStore:
    """The models of `source`, a folder or `s3://BUCKET/PREFIX`, in `folder`, which the container
    sees too.

    The one at SOURCE/KEY, a folder or an archive, is stored at `H/model`, where H is a hash of its
    place, because a key comes from clients and must not become a path. A stamp beside it says from
    which files it was made. What comes from S3 is kept in `sources`. Errors call a model `label`.
    """

    def __init__(self, source: str, folder: Path, label: str = "TargetModel") -> None:
        self._folder = folder
        self._label = label
        self._is_remote = source.startswith(S3_SCHEME)
        self._source = source.rstrip("/") if self._is_remote else str(Path(source).resolve())

    def name(self, key: str) -> str:
        """Return the name that the model has in the container. Raises AwsError for a key against
        the rule.
        """
        # S3 does not have other spellings of a key either.
        if not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise invalid(
                f"{self._label} must be a relative path without empty parts, . and .., given {key}"
            )

        digest = hashlib.sha256(f"{self._source}/{key}".encode()).hexdigest()
        return digest[:NAME_CHARS]

    def add(self, key: str) -> StoredModel:
        """Store a model, unless it is there.

        Raises AwsError if the source has no such model, or LoadFailed. It blocks.
        """
        home = self._folder / self.name(key)
        place = Place(self._folder, "--models-dir", key)
        try:
            if self._is_remote:
                source = f"{self._source}/{key}"
                download_dir = str(self._folder / "sources")
                wanted = WantedSource(source=source, download_dir=download_dir, takes_all=True)
                files = fetch(FetchJob(wanted))
            else:
                files = self._find(key)

            # Two gateways may have one folder.
            with place.only_one(home / "lock"):
                was_replaced = _update(files, home, place.check_room)

            return StoredModel(home / "model", was_replaced)
        except StartError as error:
            raise LoadFailed(f"{self._label} {key}: {error}") from error
        except OSError as error:
            raise LoadFailed(
                f"{self._label} {key} cannot be stored in {home}: {cause_line(error)}"
            ) from error

    def _find(self, key: str) -> Path:
        """Return the folder or archive. A link that leads out of the source counts as nothing."""
        source = Path(self._source)
        files = (source / key).resolve()
        if not files.is_relative_to(source) or not files.exists():
            raise invalid(f"{self._label} {key} is not below {source}")

        if not files.is_dir() and not files.name.endswith(ARCHIVE_SUFFIXES):
            raise invalid(
                f"{self._label} {key} is neither a folder nor one of {' '.join(ARCHIVE_SUFFIXES)}"
            )

        link = _link_out_of(source, files)
        if link is not None:
            raise LoadFailed(
                f"{self._label} {key}: the link {link.relative_to(files)} leads out of the source"
            )

        return files


def _link_out_of(source: Path, files: Path) -> Path | None:
    """Return a link in a model's folder, or in a folder that it links to, that leads out of the
    source, if any does.
    """
    visited: set[str] = set()
    for parent, folder_names, file_names in os.walk(files, followlinks=True):
        real_parent = os.path.realpath(parent)
        if real_parent in visited:
            folder_names.clear()
            continue

        visited.add(real_parent)
        for name in (*folder_names, *file_names):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(source):
                return path

    return None


def _update(files: Path, home: Path, check_room: Callable[[int], None]) -> bool:
    """Make the model, unless it is there as it should be. Returns whether other files were there
    before.
    """
    stamp = home / "stamp.json"
    model = home / "model"
    stamp_text = json.dumps(_stamps(files))
    if model.is_dir() and stamp.is_file() and stamp.read_text() == stamp_text:
        return False

    part = home / "part"
    # A process that was killed may have left it.
    shutil.rmtree(part, ignore_errors=True)
    try:
        if files.is_dir():
            new_model = shutil.copytree(files, part, copy_function=_link_or_copy)
        else:
            part.mkdir()
            unpack(files, part, check_room=check_room)
            new_model = descended(part)

        stamp.unlink(missing_ok=True)
        is_new = not model.exists()
        shutil.rmtree(model, ignore_errors=True)
        new_model.rename(model)
        stamp.write_text(stamp_text)
    finally:
        shutil.rmtree(part, ignore_errors=True)

    return not is_new


def _stamps(files: Path) -> list[tuple[str, int, int]]:
    """Return the path, size and time of change of each file of a folder, or of an archive."""
    paths = [files]
    if files.is_dir():
        paths = sorted(path for path in files.rglob("*") if path.is_file())

    stamps = []
    for path in paths:
        status = path.stat()
        stamps.append((str(path), status.st_size, status.st_mtime_ns))

    return stamps


def _link_or_copy(source: str, target: str) -> None:
    """Give a file a second name, which needs no room, or copy it to another disk."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
