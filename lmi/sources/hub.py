"""Fetches a repository of the hub into the hub's cache.

The files come by `Download`, because the hub's client neither compares hashes nor resumes the file of a process that
was killed. Links come after them, the configuration last, so that a start without a network finds only whole snapshots.
"""

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

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
from lmi.sources.source import ADAPTER_CONFIG, CONFIG, HubModel, chosen, fault

NO_CONNECTION = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

log = logging.getLogger(__name__)


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
        folder, wanted, names = self._cache.snapshot(commit), self._job.wanted, []
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

    # What is missing.

    def _complete(self, commit: str, listed: dict[str, HubFile]) -> None:
        """Fetch the files that are missing, with the lock of this repository, and name the revision."""
        files = [listed[name] for name in self._job.taken(self._model, listed)]
        if self._missing(commit, files):
            with self._place.only_one(self._cache.lock):
                self._bring(commit, files)
        self._cache.name_revision(commit)

    def _missing(self, commit: str, files: list[HubFile]) -> list[HubFile]:
        folder = self._cache.snapshot(commit)
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
                link(self._cache.blobs / file.id, self._cache.snapshot(commit) / file.path)
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

    # What went wrong.

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
            lack = f"its snapshot {self._cache.snapshot(commit)} {self._lack(commit)}"
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
