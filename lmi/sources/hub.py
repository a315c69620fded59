"""Fetches a repository of the hub into the hub's cache.

The files come by `Download`, because the hub's client neither compares hashes nor resumes the file of a process that
was killed. Links come after them, the configuration last, so that a start without a network finds only whole snapshots.
"""

import glob
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event

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
from lmi.sources.hub_cache import COMMIT, PART, Download, HubCache, HubFile
from lmi.sources.job import NO_BYTE_S, PASSING_STATUSES, FetchJob, MayPass, attempt, run_all
from lmi.sources.place import Place, link, size_of
from lmi.sources.source import ADAPTER_CONFIG, CONFIG, HubModel, check_inside, check_listing, chosen, fault

NO_CONNECTION = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

log = logging.getLogger(__name__)


class HubFetch:
    def __init__(self, model: HubModel, job: FetchJob) -> None:
        self._model = model
        self._job = job
        self._revision = job.wanted.revision or constants.DEFAULT_REVISION
        self._cache = HubCache(Path(constants.HF_HUB_CACHE), model.id, self._revision)
        self._failed = Event()
        variable = "HF_HUB_CACHE" if "HF_HUB_CACHE" in os.environ else "HF_HOME"
        self._place = Place(self._cache.folder, variable, job.spare_bytes)
        self._api = client.HfApi(library_name="lmi", library_version=__version__)
        self._tries_to_connect = False  # an id may be a mistyped path until the hub answers

    def fetch(self) -> Path:
        """Return the snapshot's folder: as the hub has it now, or the cached one if no hub can be reached."""
        commit = self._cache.commit()
        cached = commit if commit is not None and self._lack(commit) is None else None
        is_offline, is_pinned = constants.is_offline_mode(), COMMIT.fullmatch(self._revision) is not None
        if cached is not None and (is_offline or is_pinned):
            return self._cache.snapshot(cached)
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
            self._complete(commit, listed)
        except SourceUnreachable as error:
            if cached is None:
                raise
            commit, cause = cached, error.__cause__
            log.warning("%s: the hub cannot be reached (%s), the cached commit %s is used", self._model, cause, cached)
        return self._cache.snapshot(commit)

    def _lack(self, commit: str) -> str | None:
        """Return what keeps a cached snapshot from being whole, or None."""
        folder, listed = self._cache.snapshot(commit), []
        if (found := fault(folder, is_adapter=self._job.wanted.is_adapter)) is not None:
            return found
        with suppress(CachedRepoTreeNotFoundError):  # another client may have filled the cache
            listed = self._chosen(file.path for file in client.get_cached_repo_tree(self._model.id, revision=commit))
        return next((f"has no {name}" for name in listed if not (folder / name).is_file()), None)

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

    def _chosen(self, paths: Iterable[str]) -> list[str]:
        wanted = self._job.wanted
        return chosen(paths, allow_pickle=wanted.allow_pickle, trust_remote_code=wanted.trust_remote_code)

    # What is missing.

    def _complete(self, commit: str, listed: dict[str, HubFile]) -> None:
        """Fetch the files that are missing, with the lock of this repository, and name the revision."""
        wanted = self._job.wanted
        check_listing(self._model.id, listed, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
        names = self._chosen(listed)
        check_inside(self._model.id, names)
        files = [listed[name] for name in names]
        if self._missing(commit, files):
            with self._place.only_one(self._cache.lock, self._model):
                self._bring(commit, files)
        self._cache.name_revision(commit)

    def _missing(self, commit: str, files: list[HubFile]) -> list[HubFile]:
        folder = self._cache.snapshot(commit)
        return [file for file in files if size_of(folder / file.path) != file.size]

    def _bring(self, commit: str, files: list[HubFile]) -> None:
        missing = self._missing(commit, files)
        downloads = self._downloads(commit, missing)
        needed_bytes = sum(each.missing_bytes() for each in downloads)
        self._place.check_room(needed_bytes, self._model)
        self._job.progress.begin(self._model, sum(each.file.size for each in downloads), len(downloads))
        with self._place.writing(needed_bytes, self._model):
            self._cache.blobs.mkdir(parents=True, exist_ok=True)
            for part in {*self._cache.blobs.glob(f"*{PART}")} - {each.part for each in downloads}:
                part.unlink()  # of a file that has changed
            try:
                run_all([partial(self._fetch_file, each) for each in downloads], self._job.progress, self._failed)
            except OSError:  # of the disk, which gets its room back
                for each in downloads:
                    each.part.unlink(missing_ok=True)
                raise
            for file in sorted(missing, key=lambda file: file.path in (CONFIG, ADAPTER_CONFIG)):
                link(self._cache.blobs / file.id, self._cache.snapshot(commit) / file.path)
        with suppress(HfHubHTTPError, httpx2.HTTPError, OSError):
            # The client finds all files in its cache, and notes their names for a start without a network.
            patterns = [glob.escape(file.path) for file in files]
            client.snapshot_download(self._model.id, revision=commit, allow_patterns=patterns)

    def _downloads(self, commit: str, missing: list[HubFile]) -> list[Download]:
        """Return one for each blob that is not there, small ones first."""
        headers = build_hf_headers(library_name="lmi", library_version=__version__)
        by_id = {file.id: file for file in missing if size_of(self._cache.blobs / file.id) != file.size}
        of_all = headers, self._cache.blobs, self._job.progress, self._failed
        return [
            Download(file, client.hf_hub_url(self._model.id, file.path, revision=commit), *of_all)
            for file in sorted(by_id.values(), key=lambda file: file.size)
        ]

    def _fetch_file(self, download: Download) -> None:
        attempt(
            self._explained()(download.bring),
            f"{self._model}: {download.file.path}",
            self._job.delays_s,
            reached=lambda: download.furthest,
            wait=self._failed.wait,
        )

    # What went wrong.

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of the client into MayPass or an error that says what is wrong for good."""
        try:
            yield
        except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: BaseException) -> Exception:
        if isinstance(error, HfHubHTTPError):
            return self._of_answer(error)
        if isinstance(error, NO_CONNECTION) and not self._tries_to_connect:
            said = f"{constants.ENDPOINT}: {type(error).__name__}: {cause_line(error)}"
            return SourceUnreachable(f"{self._subject} it cannot be reached: {said}")
        if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError):
            return MayPass(f"{constants.ENDPOINT}: {type(error).__name__}: {cause_line(error)}")
        if isinstance(error, OSError) and error.errno is not None:
            return error  # of the disk
        return ModelUnusable(f"{self._model}: {constants.ENDPOINT} does not answer as a hub: {cause_line(error)}")

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
            return MayPass(said, _asked_wait_s(error.response))
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
            lack = f"its snapshot {self._cache.snapshot(commit)} {self._lack(commit)}"
        asked = f"{variable}={os.environ.get(variable, '')} forbids to ask the hub for revision {self._revision}"
        return ModelUnusable(f"{self._subject} {lack}, and {asked}")


def _limit_silence(request: httpx2.Request) -> None:
    limits: dict[str, float | None] = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {name: limits.get(name) or NO_BYTE_S for name in names}


def _asked_wait_s(response: httpx2.Response) -> float:
    """Return for how long a busy hub asks to be left alone."""
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0
