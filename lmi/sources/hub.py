"""Fetches a repository of the hub into the hub's cache, with the hub's client.

The client keeps whole files, and within one process it resumes a file where its connection broke. It does not resume
the file of another process: such a file is removed and fetched again. A revision's name (`refs/main` in the cache) is
written here, when the snapshot is whole, so that a later start without a network finds only whole ones. Sources: the
documentation of the hub's cache, and huggingface_hub 2.4.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock, Timeout
from huggingface_hub import HfApi, RepoFile, constants, get_cached_repo_tree, get_token, set_client_factory
from huggingface_hub import snapshot_download as download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.std import tqdm  # type: ignore[import-untyped]

from lmi import __version__
from lmi.errors import ModelUnusable, SourceUnreachable, StartError, cause_line, shorten
from lmi.sources.complete import check_listing, fault
from lmi.sources.files import check_inside, chosen
from lmi.sources.job import Job
from lmi.sources.place import Place, size_of
from lmi.sources.progress import Progress
from lmi.sources.source import HubModel
from lmi.sources.tries import NO_BYTE_S, PASSING_STATUSES, Damaged, MayPass, attempt

MAX_WORKERS = 8
CHUNK_BYTES = 1 << 20  # what a broken connection loses at most, and the step of the progress; the client has 10 MiB
COMMIT = re.compile(r"[0-9a-f]{40}")
WRONG_SIZE = "Consistency check failed"  # how the client's OSError begins
NO_CONNECTION = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit: size by path."""

    commit: str
    sizes: dict[str, int]


class HubFetch:
    def __init__(self, model: HubModel, job: Job) -> None:
        self._model = model
        self._job = job
        self._revision = job.wanted.revision or constants.DEFAULT_REVISION
        self._cache = Path(constants.HF_HUB_CACHE)
        self._storage = self._cache / f"models--{model.id.replace('/', '--')}"
        variable = "HF_HUB_CACHE" if "HF_HUB_CACHE" in os.environ else "HF_HOME"
        self._place = Place(self._cache, variable, job.spare_bytes)
        self._api = HfApi(library_name="lmi", library_version=__version__)
        self._tries_to_connect = job.wanted.is_adapter  # a model's id may be a mistyped path until the hub answers

    def fetch(self) -> tuple[Path, str]:
        """Return the snapshot's folder and its commit."""
        is_pinned = COMMIT.fullmatch(self._revision) is not None
        if (is_pinned or constants.is_offline_mode()) and (cached := self._cached()) is not None:
            return self._snapshot(cached), cached
        if constants.is_offline_mode():
            raise self._offline()
        set_client_factory(_client)
        constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        commit = attempt(self._current_commit, self._model, self._job.delays_s)
        return self._snapshot(commit), commit

    # What is there.

    def _snapshot(self, commit: str) -> Path:
        return self._storage / "snapshots" / commit

    def _cached(self) -> str | None:
        """Return the commit of the revision if its snapshot is whole in the cache."""
        commit = self._cached_commit()
        return commit if commit is not None and self._lack(commit) is None else None

    def _cached_commit(self) -> str | None:
        """Return the commit that the revision means in the cache."""
        if COMMIT.fullmatch(self._revision):
            return self._revision
        with suppress(OSError):
            return (self._storage / "refs" / self._revision).read_text().strip()
        return None

    def _lack(self, commit: str) -> str | None:
        """Return what keeps a cached snapshot from being whole, or None."""
        folder, listed = self._snapshot(commit), []
        if (found := fault(folder, is_adapter=self._job.wanted.is_adapter)) is not None:
            return found
        with suppress(CachedRepoTreeNotFoundError):  # another client may have filled the cache
            listed = self._chosen(file.path for file in get_cached_repo_tree(self._model.id, revision=commit))
        return next((f"has no {name}" for name in listed if not (folder / name).is_file()), None)

    def _current_commit(self) -> str:
        """Bring the cache up to date and return the revision's commit, or the cached one if no hub can be reached."""
        try:
            with self._explained():
                listing = self._list()
            self._complete(listing)
            return listing.commit
        except (MayPass, SourceUnreachable) as error:
            if (cached := self._cached()) is None:
                raise
            log.warning("%s: the hub cannot be reached (%s), the cached commit %s is used", self._model, error, cached)
            return cached

    def _list(self) -> Listing:
        info = self._api.model_info(self._model.id, revision=self._revision, timeout=NO_BYTE_S)
        self._tries_to_connect = True
        commit = str(info.sha)
        if not COMMIT.fullmatch(commit):
            raise ValueError(f"it names the commit {shorten(commit)}")
        log.info("%s: revision %s is commit %s", self._model, self._revision, commit)
        try:
            files = get_cached_repo_tree(self._model.id, revision=commit)
        except CachedRepoTreeNotFoundError:
            tree = self._api.list_repo_tree(self._model.id, recursive=True, revision=commit)
            files = [file for file in tree if isinstance(file, RepoFile)]
        return Listing(commit, {file.path: file.size for file in files})

    def _chosen(self, paths: Iterable[str]) -> list[str]:
        wanted = self._job.wanted
        return chosen(paths, allow_pickle=wanted.allow_pickle, trust_remote_code=wanted.trust_remote_code)

    # What is missing.

    def _complete(self, listing: Listing) -> None:
        """Fetch the files that are missing, with the lock of this repository, and name the revision."""
        wanted = self._job.wanted
        check_listing(self._model.id, listing.sizes, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
        names = self._chosen(listing.sizes)
        check_inside(self._model.id, names)
        if self._missing(listing, names):
            with self._place.only_one(self._cache / ".locks" / self._storage.name / "lmi.lock", self._model):
                self._remove_torn()
                self._download(listing, names)
        self._name_revision(listing.commit)

    def _missing(self, listing: Listing, names: list[str]) -> list[str]:
        folder = self._snapshot(listing.commit)
        return [name for name in names if not (folder / name).is_file()]

    def _download(self, listing: Listing, names: list[str]) -> None:
        missing = self._missing(listing, names)
        needed_bytes = sum(listing.sizes[name] for name in missing)
        self._place.check_room(needed_bytes, self._model)
        self._job.progress.begin(self._model, needed_bytes, len(missing))
        with self._place.writing(needed_bytes, self._model), self._explained():
            download(
                self._model.id,
                revision=listing.commit,
                allow_patterns=[glob.escape(name) for name in missing],
                max_workers=MAX_WORKERS,
                tqdm_class=_counting(self._job.progress),
                library_name="lmi",
                library_version=__version__,
            )
        self._check_sizes(listing, names)

    def _check_sizes(self, listing: Listing, names: list[str]) -> None:
        folder = self._snapshot(listing.commit)
        for name in names:
            if (found := size_of(folder / name)) != (wanted := listing.sizes[name]):
                (folder / name).resolve().unlink(missing_ok=True)
                (folder / name).unlink(missing_ok=True)
                raise Damaged(name, wanted=f"{wanted} bytes", found=found)

    def _remove_torn(self) -> None:
        """Remove the parts of files that killed processes left. Their locks show that no process works on them."""
        for part in (self._storage / "blobs").glob("*.incomplete"):
            lock = self._cache / ".locks" / self._storage.name / f"{part.name.partition('.')[0]}.lock"
            with suppress(Timeout, OSError), FileLock(lock, timeout=0):
                part.unlink(missing_ok=True)

    def _name_revision(self, commit: str) -> None:
        """Let the name of the revision mean this commit in the cache, for a start without a network."""
        ref = self._storage / "refs" / self._revision
        with suppress(OSError):  # the cache may be read-only
            if COMMIT.fullmatch(self._revision) or (ref.is_file() and ref.read_text() == commit):
                return
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f"{ref.name}.{os.getpid()}")
            new.write_text(commit)
            new.replace(ref)

    # What went wrong.

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of the client into MayPass, Damaged or an error that says what is wrong for good."""
        try:
            yield
        except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:  # the client found no network midway
            raise self._meaning(error.__cause__ or error) from error
        except (HfHubHTTPError, httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: BaseException) -> Exception:
        if isinstance(error, HfHubHTTPError):
            return self._of_answer(error)
        if isinstance(error, OSError) and str(error).startswith(WRONG_SIZE):
            return Damaged("a file", wanted="the size that the hub promised", found=cause_line(error))
        if isinstance(error, NO_CONNECTION) and not self._tries_to_connect:
            said = f"{constants.ENDPOINT}: {type(error).__name__}: {cause_line(error)}"
            return SourceUnreachable(f"{self._subject} it cannot be reached: {said}")
        if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError | RuntimeError):  # the last: hf_xet
            return MayPass(f"{constants.ENDPOINT}: {type(error).__name__}: {cause_line(error)}")
        if isinstance(error, OSError) and error.errno is not None:
            return error  # of the disk
        return ModelUnusable(f"{self._model}: {constants.ENDPOINT} does not answer as a hub: {cause_line(error)}")

    def _of_answer(self, error: HfHubHTTPError) -> Exception:
        status, self._tries_to_connect = error.response.status_code, True
        if isinstance(error, GatedRepoError):
            page = f"{constants.ENDPOINT}/{self._model}"
            return self._final(f"is gated: accept its licence at {page} with the account of the token; {_token()}")
        if isinstance(error, RevisionNotFoundError):
            return self._final(f"has no revision {self._revision} at {constants.ENDPOINT}")
        if status in (401, 403, 404):
            said = f"{self._subject} there is no such model, or it is private: {self._said(error)}"
            return ModelUnusable(f"{said}; {_token()}")
        said = self._said(error)
        return MayPass(said) if status in PASSING_STATUSES else self._final(said)

    def _said(self, error: HfHubHTTPError) -> str:
        return f"{constants.ENDPOINT} answers {error.response.status_code}: {cause_line(error)}"

    def _final(self, said: str) -> StartError:
        return ModelUnusable(f"{self._model}: {said}")

    @property
    def _subject(self) -> str:
        """The beginning of a message about an id that is perhaps a path."""
        return f"{self._model}:" if self._job.wanted.is_adapter else f"no folder {self._model} here; as an id of a hub"

    def _offline(self) -> StartError:
        [variable, *_] = [*filter(os.environ.get, OFFLINE_VARIABLES), OFFLINE_VARIABLES[0]]
        commit = self._cached_commit()
        lack = f"it is not in the cache {self._cache}"
        if commit is not None:
            lack = f"its snapshot {self._snapshot(commit)} {self._lack(commit)}"
        asked = f"{variable}={os.environ.get(variable, '')} forbids to ask the hub for revision {self._revision}"
        return ModelUnusable(f"{self._subject} {lack}, and {asked}")


def _token() -> str:
    return f"HF_TOKEN is {'set' if get_token() else 'not set'}"


def _client() -> httpx2.Client:
    """Return the HTTP client of the hub's library, whose own has no time limit for some requests."""
    return httpx2.Client(event_hooks={"request": [_limit_silence]}, follow_redirects=True)


def _limit_silence(request: httpx2.Request) -> None:
    limits: dict[str, float | None] = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {name: limits.get(name) or NO_BYTE_S for name in names}


def _counting(progress: Progress) -> type[Any]:
    """Return a progress bar that shows nothing and counts in `progress`.

    The client has a bar for files and two for bytes: those that arrive and those that are written. With xet, each may
    be ahead of the other.
    """

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": io.StringIO(), "leave": False})

        def display(self, *args: Any, **options: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> bool:
            if self.unit == "B":
                progress.add(int(n or 0), lane=id(self))
            else:
                progress.file_done()
            return bool(super().update(n))

    return Bar
