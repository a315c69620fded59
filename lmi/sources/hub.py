"""Fetches a repository of the hub into the cache of the hub's client.

    models--OWNER--NAME/blobs/ID                    the bytes of a file
    models--OWNER--NAME/snapshots/COMMIT/PATH       a link to them
    models--OWNER--NAME/refs/main                   the commit of a revision, written when its snapshot is whole
    .locks/models--OWNER--NAME/lmi.lock             one process fetches at a time

The files come by `Download`, because the hub's client neither compares hashes nor resumes the file of a process that
was killed. What arrived of one stays beside the blobs, and the next try or process asks only for the rest. Links come
after them, the configuration last, so that a start without a network finds only whole snapshots. Sources: the
documentation of the hub's cache, and huggingface_hub 2.4.
"""

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple, Self

import httpx2
import huggingface_hub as client
from huggingface_hub import constants
from huggingface_hub.errors import CachedRepoTreeNotFoundError, GatedRepoError, HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    disable_progress_bars,
    parse_ratelimit_headers,
)

from lmi import __version__
from lmi.errors import ModelUnusable, SourceUnreachable, StartError, cause_line, shorten
from lmi.shared.linux import write_whole
from lmi.sources.fetches import Place, link, size_of
from lmi.sources.job import NO_BYTE_S, PASSING_STATUSES, Damaged, FetchJob, MayPass, Progress, attempt, run_all
from lmi.sources.source import ADAPTER_CONFIG, CONFIG, HubModel, chosen, fault, taken

NO_CONNECTION = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
COMMIT = re.compile(r"[0-9a-f]{40}")
ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
PART = ".lmi.incomplete"  # its end is that of the parts of the hub's client, which lists them for who cleans the cache
RANGE_BYTES = 40_000_000_000  # of one answer, because some hosts of a hub's files send no more at once
READ_BYTES = 1 << 20

log = logging.getLogger(__name__)


class HubFile(NamedTuple):
    """A file as the hub's listing describes it."""

    path: str
    size: int
    id: str  # of its bytes, which names its blob: their SHA-256, or the id that git gives them
    sha256: str | None = None  # of its bytes, if the listing has it

    @classmethod
    def of(cls, file: client.RepoFile) -> Self:
        sha256 = file.lfs.sha256 if file.lfs is not None else None
        id = sha256 or file.blob_id
        if not ID.fullmatch(id):  # it becomes the name of a file
            raise ValueError(f"it lists {shorten(file.path)} with the id {shorten(id)}")
        return cls(file.path, file.size, id, sha256)


@dataclass
class Download:
    """One file on its way into the folder of blobs."""

    file: HubFile
    url: str
    headers: dict[str, str]
    folder: Path
    progress: Progress
    range_bytes: int = RANGE_BYTES
    furthest = 0  # how many bytes were here at most
    _num_bytes = 0  # in the part, of which the hash is

    def __post_init__(self) -> None:
        self.whole, self.part = self.folder / self.file.id, self.folder / f"{self.file.id}{PART}"
        self._hash = hashlib.sha256()

    def bring(self) -> None:
        """Fetch what is missing. What arrived stays if the client raises an error. Raises Damaged or Stopped too."""
        try:
            with open(self.part, "ab") as out:
                if out.tell() != self._num_bytes:
                    self._take_up(out)
                while self._num_bytes < self.file.size:
                    self._read(out)
            found = self._hash.hexdigest()
            if self.file.sha256 not in (None, found):
                raise Damaged(wanted=f"SHA-256 {self.file.sha256}", found=found)
        except Damaged:
            self._forget()
            self.part.unlink(missing_ok=True)
            raise
        self.part.replace(self.whole)

    def _take_up(self, out: BufferedWriter) -> None:
        """Hash what an earlier process left."""
        self._forget()
        if out.tell() > self.file.size:
            out.truncate(0)
            return
        with open(self.part, "rb") as left:
            while data := left.read(READ_BYTES):
                self._count(data)

    def _read(self, out: BufferedWriter) -> None:
        """Ask once, for the rest of the file or the next part of a very large one."""
        first, end = self._num_bytes, min(self._num_bytes + self.range_bytes, self.file.size)
        headers = self.headers | {"Accept-Encoding": "identity"}
        if first or end < self.file.size:
            headers["Range"] = f"bytes={first}-{'' if end == self.file.size else end - 1}"
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with client.get_session().stream("GET", self.url, headers=headers, timeout=limit_s) as response:
            status, begins = response.status_code, response.headers.get("Content-Range", "")
            is_further = begins.startswith(f"bytes {first}-") if status == 206 else status not in (200, 416)
            if first and not is_further:  # another error says nothing about the bytes
                self._forget()
                out.truncate(0)
                if status != 200:
                    return
            client.hf_raise_for_status(response)
            for data in response.iter_bytes():
                if self._num_bytes + len(data) > self.file.size:
                    raise Damaged(wanted=f"{self.file.size} bytes", found="more")
                out.write(data)
                self._count(data)
        if self._num_bytes < end:
            raise Damaged(wanted=f"{self.file.size} bytes", found=self._num_bytes)

    def _count(self, data: bytes) -> None:
        self.progress.add(len(data))
        self._hash.update(data)
        self._num_bytes += len(data)
        self.furthest = max(self.furthest, self._num_bytes)

    def _forget(self) -> None:
        self.progress.add(-self._num_bytes)
        self._hash, self._num_bytes = hashlib.sha256(), 0


class HubCache:
    def __init__(self, folder: Path, id: str, revision: str) -> None:
        storage = folder / f"models--{id.replace('/', '--')}"
        self.folder = folder
        self.blobs, self.snapshots = storage / "blobs", storage / "snapshots"
        self.lock = folder / ".locks" / storage.name / "lmi.lock"
        self._revision = revision
        self._ref = storage / "refs" / revision

    def commit(self) -> str | None:
        """Return the commit that the revision means here, if it means one."""
        if COMMIT.fullmatch(self._revision):
            return self._revision
        with suppress(OSError):
            return self._ref.read_text().strip()
        return None

    def name_revision(self, commit: str) -> None:
        """Let the revision mean this commit, for a start without a network."""
        with suppress(OSError):  # the cache may be read-only
            if self.commit() == commit:
                return
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._ref, commit.encode())


class HubFetch:
    def __init__(self, model: HubModel, job: FetchJob) -> None:
        self._model = model
        self._job = job
        self._revision = job.wanted.revision or constants.DEFAULT_REVISION
        self._cache = HubCache(Path(constants.HF_HUB_CACHE), model.id, self._revision)
        variable = "HF_HUB_CACHE" if "HF_HUB_CACHE" in os.environ else "HF_HOME"
        self._place = Place(self._cache.folder, variable, model, job.spare_bytes)
        self._api = client.HfApi(library_name="lmi", library_version=__version__)
        self._tries_to_connect = False  # an id may be a mistyped path until the hub answers

    def fetch(self) -> Path:
        """Return the snapshot's folder: as the hub has it now, or the cached one if no hub can be reached."""
        commit = self._cache.commit()
        cached = commit if commit is not None and self._lack(commit) is None else None
        is_offline, is_pinned = constants.is_offline_mode(), COMMIT.fullmatch(self._revision) is not None
        if cached is not None and (is_offline or is_pinned):
            return self._cache.snapshots / cached
        if is_offline:
            raise self._offline(commit)
        # The client's own HTTP client has no time limit for some requests.
        hooks = {"request": [_limit_silence]}
        client.set_client_factory(lambda: httpx2.Client(event_hooks=hooks, follow_redirects=True))
        disable_progress_bars()
        self._tries_to_connect = cached is not None
        try:
            # With a commit in the cache one try is enough.
            commit, listed = attempt(self._explained()(self._list), self._model, () if cached else self._job.delays_s)
            files = [listed[name] for name in taken(self._model, listed, self._job.wanted)]
            if self._missing(commit, files):
                with self._place.only_one(self._cache.lock):
                    self._bring(commit, files)
            self._cache.name_revision(commit)
        except SourceUnreachable as error:
            if cached is None:
                raise
            commit, cause = cached, error.__cause__
            log.warning("%s: the hub cannot be reached (%s), the cached commit %s is used", self._model, cause, cached)
        return self._cache.snapshots / commit

    def _lack(self, commit: str) -> str | None:
        """Return what keeps a cached snapshot from being whole, or None."""
        folder, wanted, names = self._cache.snapshots / commit, self._job.wanted, []
        if (found := fault(folder, is_adapter=wanted.is_adapter)) is not None:
            return found
        with suppress(CachedRepoTreeNotFoundError):  # another client may have filled the cache
            listed = (file.path for file in client.get_cached_repo_tree(self._model.id, revision=commit))
            names = chosen(listed, allow_pickle=wanted.allow_pickle, trust_remote_code=wanted.trust_remote_code)
        return next((f"has no {name}" for name in names if not (folder / name).is_file()), None)

    def _list(self) -> tuple[str, dict[str, HubFile]]:
        """Return the commit of the revision, and its files by path."""
        info = self._api.model_info(self._model.id, revision=self._revision, timeout=NO_BYTE_S)
        self._tries_to_connect = True
        commit = str(info.sha)
        if not COMMIT.fullmatch(commit):
            raise ValueError(f"it names the commit {shorten(commit)}")
        log.info("%s: revision %s is commit %s", self._model, self._revision, commit)
        try:
            files = client.get_cached_repo_tree(self._model.id, revision=commit)
        except CachedRepoTreeNotFoundError:
            tree = self._api.list_repo_tree(self._model.id, recursive=True, revision=commit)
            files = [file for file in tree if isinstance(file, client.RepoFile)]
        return commit, {file.path: HubFile.of(file) for file in files}

    def _missing(self, commit: str, files: list[HubFile]) -> list[HubFile]:
        folder = self._cache.snapshots / commit
        return [file for file in files if size_of(folder / file.path) != file.size]

    def _bring(self, commit: str, files: list[HubFile]) -> None:
        missing = self._missing(commit, files)
        headers = build_hf_headers(library_name="lmi", library_version=__version__)
        of_all = headers, self._cache.blobs, self._job.progress
        by_id = {file.id: file for file in missing if size_of(self._cache.blobs / file.id) != file.size}
        downloads = [
            Download(file, client.hf_hub_url(self._model.id, file.path, revision=commit), *of_all)
            for file in sorted(by_id.values(), key=lambda file: file.size)  # small ones first
        ]
        needed_bytes = sum(each.file.size - (size_of(each.part) or 0) for each in downloads)
        self._place.check_room(needed_bytes)
        self._job.progress.begin(self._model, sum(each.file.size for each in downloads), len(downloads))
        with self._place.writing(needed_bytes):
            self._cache.blobs.mkdir(parents=True, exist_ok=True)
            for part in {*self._cache.blobs.glob(f"*{PART}")} - {each.part for each in downloads}:
                part.unlink()  # of a file that has changed
            try:
                run_all([partial(self._fetch_file, each) for each in downloads], self._job.progress)
            except OSError:  # of the disk, which gets its room back
                for each in downloads:
                    each.part.unlink(missing_ok=True)
                raise
            for file in sorted(missing, key=lambda file: file.path in (CONFIG, ADAPTER_CONFIG)):
                link(self._cache.blobs / file.id, self._cache.snapshots / commit / file.path)
        with suppress(HfHubHTTPError, httpx2.HTTPError, OSError):
            # The client finds all files in its cache, and notes their names for a start without a network.
            patterns = [glob.escape(file.path) for file in files]
            client.snapshot_download(self._model.id, revision=commit, allow_patterns=patterns)

    def _fetch_file(self, download: Download) -> None:
        attempt(
            self._explained()(download.bring),
            f"{self._model}: {download.file.path}",
            self._job.delays_s,
            reached=lambda: download.furthest,
            wait=self._job.progress.stopped.wait,
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of the client into MayPass or an error that says what is wrong for good."""
        try:
            yield
        except HfHubHTTPError as error:
            raise self._of_answer(error) from error
        except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
            said = f"{constants.ENDPOINT}: {type(error).__name__}: {cause_line(error)}"
            if isinstance(error, NO_CONNECTION) and not self._tries_to_connect:
                raise SourceUnreachable(f"{self._subject} it cannot be reached: {said}") from error
            raise MayPass(said) from error
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            said = f"{constants.ENDPOINT} does not answer as a hub: {cause_line(error)}"
            raise ModelUnusable(f"{self._model}: {said}") from error

    def _of_answer(self, error: HfHubHTTPError) -> Exception:
        status, self._tries_to_connect = error.response.status_code, True
        said = f"{constants.ENDPOINT} answers {status}: {cause_line(error)}"
        token = f"HF_TOKEN is {'set' if client.get_token() else 'not set'}"
        if isinstance(error, GatedRepoError):
            page = f"{constants.ENDPOINT}/{self._model}"
            said = f"is gated: accept its licence at {page} with the account of the token; {token}"
        elif isinstance(error, RevisionNotFoundError):
            said = f"has no revision {self._revision} at {constants.ENDPOINT}"
        elif status in (401, 403, 404):
            return ModelUnusable(f"{self._subject} there is no such model, or it is private: {said}; {token}")
        elif status in PASSING_STATUSES:
            return MayPass(said, _asked_wait_s(error.response.headers))
        return ModelUnusable(f"{self._model}: {said}")

    @property
    def _subject(self) -> str:
        """The beginning of a message about an id that is perhaps a path."""
        if self._job.wanted.is_adapter:
            return f"{self._model}: no such folder below the model's; as an id of a hub"
        return f"no folder {self._model} here; as an id of a hub"

    def _offline(self, commit: str | None) -> StartError:
        [variable, *_] = [*filter(os.environ.get, OFFLINE_VARIABLES), OFFLINE_VARIABLES[0]]
        lack = f"it is not in the cache {self._cache.folder}"
        if commit is not None:
            lack = f"its snapshot {self._cache.snapshots / commit} {self._lack(commit)}"
        asked = f"{variable}={os.environ.get(variable, '')} forbids to ask the hub for revision {self._revision}"
        return ModelUnusable(f"{self._subject} {lack}, and {asked}")


def _limit_silence(request: httpx2.Request) -> None:
    limits: dict[str, float | None] = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {name: limits.get(name) or NO_BYTE_S for name in names}


def _asked_wait_s(headers: httpx2.Headers) -> float:
    limit, seconds = parse_ratelimit_headers(headers), headers.get("Retry-After", "")
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    return float(seconds) if seconds.isdecimal() else 0.0
