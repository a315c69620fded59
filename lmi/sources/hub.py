"""Fetches a repository of the hub into the cache of the hub's client.

    models--OWNER--NAME/blobs/ID                the bytes of a file
    models--OWNER--NAME/snapshots/COMMIT/PATH   a link to them
    models--OWNER--NAME/trees/COMMIT.json       the listing of a commit, written when its snapshot
                                                is whole
    models--OWNER--NAME/refs/main               the commit of a revision, written then too
    .locks/models--OWNER--NAME/lmi.lock         one process fetches at a time

The files come by `Download`, because the hub's client neither compares hashes nor resumes the file
of a process that was killed. What arrived of one stays beside the blobs, and the next try or
process asks only for the rest. Links come after them, the configuration last, so that a start
without a network finds only whole snapshots. A small file is compared with its id at each start, so
that a wrong one in the cache is fetched anew. Sources: the documentation of the hub's cache, and
huggingface_hub 2.4.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx2
import huggingface_hub as client
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from lmi import __version__
from lmi.errors import ModelUnusable, SourceUnreachable, StartError, cause_line, shorten
from lmi.sources.files_on_disk import link, size_of
from lmi.sources.hub_cache import HubCache
from lmi.sources.hub_client import HubClient, HubRefusal, NoHub
from lmi.sources.hub_download import PART, Download
from lmi.sources.hub_file import HubFile
from lmi.sources.hub_listing import COMMIT, HubApi
from lmi.sources.job import PASSING_STATUSES, FetchJob, MayPass, attempt, run_all
from lmi.sources.kept_listing import KeptListing, files_by_blobs
from lmi.sources.listing import gguf_paths, taken
from lmi.sources.place import Place
from lmi.sources.reach import Reach
from lmi.sources.source import ADAPTER_CONFIG, CONFIG, GGUF, HubModel, chosen, fault

NO_CONNECTION = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# The hub's words for these errors.
GATED = "GatedRepo"
NO_REVISION = "RevisionNotFound"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """A commit in the cache, and the paths of the files that are taken of it."""

    commit: str
    paths: list[str]


class NotWhole(Exception):
    """A cached snapshot lacks something, or has other bytes than the hub's. The text is what."""


class Listing(NamedTuple):
    """The commit that a revision means now, and its files."""

    commit: str
    files: list[HubFile]


class HubFetch:
    """The fetch of one model of a hub."""

    def __init__(self, model: HubModel, job: FetchJob) -> None:
        self._model = model
        self._job = job
        self._revision = job.wanted.revision or constants.DEFAULT_REVISION
        self._cache = HubCache(Path(constants.HF_HUB_CACHE), model.id, self._revision)
        variable = "HF_HUB_CACHE" if "HF_HUB_CACHE" in os.environ else "HF_HOME"
        self._place = Place(self._cache.folder, variable, model, job.spare_bytes)
        self._headers = build_hf_headers(library_name="lmi", library_version=__version__)
        self._hub = HubClient(model, _reach(model, job.wanted.opened_hosts))
        self._api = HubApi(self._hub, constants.ENDPOINT, model.id, self._headers, job.progress.add)
        # An id may be a mistyped path until the hub answers.
        self._tries_to_connect = False

    def fetch(self) -> Path:
        """Return the snapshot's folder, or the first file of the GGUF model in it: as the hub has
        it now, or the cached one if no hub can be reached.
        """
        commit = self._cache.commit()
        cached = None
        # Why the cached commit does not do.
        lack = None
        if commit is not None:
            try:
                cached = self._cached(commit)
            except NotWhole as error:
                lack = str(error)
            except ModelUnusable as error:
                lack = f"does not do: {error}"

        is_offline = constants.is_offline_mode()
        is_pinned = COMMIT.fullmatch(self._revision) is not None
        if cached is not None and (is_offline or is_pinned):
            return self._place_of(cached)

        if is_offline:
            raise self._offline(commit, lack)

        self._tries_to_connect = cached is not None
        with closing(self._hub):
            return self._place_of(self._updated(cached))

    def _place_of(self, snapshot: CachedSnapshot) -> Path:
        folder = self._cache.snapshots / snapshot.commit
        gguf_files = [path for path in snapshot.paths if path.endswith(GGUF)]
        return folder / gguf_files[0] if gguf_files else folder

    def _updated(self, cached: CachedSnapshot | None) -> CachedSnapshot:
        """Return the snapshot that is now whole: the hub's, or the cached one if no hub can be
        reached.
        """
        # With a commit in the cache one try is enough.
        delays_s = () if cached else self._job.delays_s
        ask_for_listing = self._explained()(self._list)
        try:
            commit, listed_files = attempt(ask_for_listing, self._model, delays_s)
            files = self._taken(listed_files)
            if self._missing(commit, files):
                with self._place.only_one(self._cache.lock):
                    self._bring(commit, files)

            kept_listing = KeptListing(self._cache.storage, commit)
            if kept_listing.read() != listed_files:
                kept_listing.write(listed_files)

            self._cache.name_revision(commit)
        except SourceUnreachable as error:
            if cached is None:
                raise

            cause = error.__cause__
            log.warning(
                "%s: the hub cannot be reached (%s), the cached commit %s is used",
                self._model,
                cause,
                cached.commit,
            )
            return cached

        return CachedSnapshot(commit, [file.path for file in files])

    def _cached(self, commit: str) -> CachedSnapshot:
        """Return a cached snapshot. Raises NotWhole or ModelUnusable unless it is whole and
        right.
        """
        folder = self._cache.snapshots / commit
        files = KeptListing(self._cache.storage, commit).read()
        if files is None:
            # Another client may have filled the cache.
            files = files_by_blobs(folder)

        by_path = {file.path: file for file in files}
        paths = self._paths_in(folder, by_path)
        for path in paths:
            reason = by_path[path].fault_of(folder / path)
            if reason is not None:
                raise NotWhole(reason)

        return CachedSnapshot(commit, paths)

    def _paths_in(self, folder: Path, by_path: Mapping[str, HubFile]) -> list[str]:
        """Return the paths that are taken of the files of a cached snapshot. Raises NotWhole if its
        folder lacks one that makes a model.
        """
        wanted_source = self._job.wanted
        paths = gguf_paths(self._model, list(by_path), is_adapter=wanted_source.is_adapter)
        if paths:
            return paths

        reason = fault(folder, is_adapter=wanted_source.is_adapter)
        if reason is not None:
            raise NotWhole(reason)

        return chosen(
            by_path,
            allow_pickle=wanted_source.allow_pickle,
            trust_remote_code=wanted_source.trust_remote_code,
        )

    def _list(self) -> Listing:
        """Ask the hub for the commit of the revision and, unless a kept listing does, for its
        files.
        """
        commit = self._api.commit_of(self._revision)
        self._tries_to_connect = True
        log.info("%s: revision %s is commit %s", self._model, self._revision, commit)

        files = KeptListing(self._cache.storage, commit).read()
        if files is not None and not self._missing(commit, self._taken(files)):
            return Listing(commit, files)

        # The kept listing may also be what is wrong.
        return Listing(commit, self._api.files_of(commit))

    def _taken(self, files: list[HubFile]) -> list[HubFile]:
        """Return the files that make the model."""
        by_path = {file.path: file for file in files}
        return [by_path[name] for name in taken(self._model, by_path, self._job.wanted)]

    def _missing(self, commit: str, files: list[HubFile]) -> list[HubFile]:
        """Return the files of a snapshot that are not there, or whose bytes are not those of the
        hub.
        """
        folder = self._cache.snapshots / commit
        return [file for file in files if file.fault_of(folder / file.path) is not None]

    def _bring(self, commit: str, files: list[HubFile]) -> None:
        """Fetch the files that are missing in a snapshot, and give them their names."""
        missing = self._missing(commit, files)
        downloads = self._downloads(commit, missing)
        needed_bytes = 0
        for download in downloads:
            needed_bytes += download.file.size - (size_of(download.part) or 0)

        self._place.check_room(needed_bytes)
        total_bytes = sum(download.file.size for download in downloads)
        self._job.progress.begin(self._model, total_bytes, len(downloads))

        blobs = self._cache.blobs
        with self._place.writing(needed_bytes):
            blobs.mkdir(parents=True, exist_ok=True)
            self._fetch_all(downloads)

            # The configuration is last, so that only a whole snapshot has one.
            for file in sorted(missing, key=lambda file: file.path in (CONFIG, ADAPTER_CONFIG)):
                link(blobs / file.id, self._cache.snapshots / commit / file.path)

    def _fetch_all(self, downloads: list[Download]) -> None:
        # The other parts are of files that have changed.
        parts = {download.part for download in downloads}
        for part in self._cache.blobs.glob(f"*{PART}"):
            if part not in parts:
                part.unlink()

        try:
            tasks = [partial(self._fetch_file, download) for download in downloads]
            run_all(tasks, self._job.progress)
        except OSError:
            # The error is of the disk, which gets its room back.
            for download in downloads:
                download.part.unlink(missing_ok=True)

            raise

    def _downloads(self, commit: str, missing: list[HubFile]) -> list[Download]:
        """Return the downloads of the blobs that are not there or not right, small ones first."""
        blobs = self._cache.blobs
        by_id: dict[str, HubFile] = {}
        for file in missing:
            fault_of_blob = file.fault_of(blobs / file.id)
            if fault_of_blob is None:
                continue

            by_id[file.id] = file
            if (blobs / file.id).exists():
                log.warning("%s: the cache %s; it is fetched anew", self._model, fault_of_blob)

        downloads: list[Download] = []
        for file in sorted(by_id.values(), key=lambda file: file.size):
            url = self._api.url_of(commit, file)
            downloads.append(
                Download(self._hub, file, url, self._headers, blobs, self._job.progress)
            )

        return downloads

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
        """Turn what goes wrong with a hub into MayPass or an error that says what is wrong for
        good.
        """
        try:
            yield
        except HubRefusal as error:
            raise self._of_answer(error) from error
        except httpx2.HTTPError as error:
            reason = f"{constants.ENDPOINT}: {type(error).__name__}: {cause_line(error)}"
            if isinstance(error, NO_CONNECTION) and not self._tries_to_connect:
                raise SourceUnreachable(
                    f"{self._subject} it cannot be reached: {reason}"
                ) from error

            raise MayPass(reason) from error
        except (NoHub, httpx2.InvalidURL) as error:
            reason = f"{constants.ENDPOINT} does not answer as a hub: {cause_line(error)}"
            raise ModelUnusable(f"{self._model}: {reason}") from error

    def _of_answer(self, refusal: HubRefusal) -> Exception:
        """Return the error that a refusal of the hub is."""
        # It has answered, so the id is no path.
        self._tries_to_connect = True
        token = f"HF_TOKEN is {'set' if client.get_token() else 'not set'}"
        if refusal.code == GATED:
            page = f"{constants.ENDPOINT}/{self._model.id}"
            return ModelUnusable(
                f"{self._model}: is gated: accept its licence at {page} with the account of the "
                f"token; {token}"
            )

        if refusal.code == NO_REVISION:
            return ModelUnusable(
                f"{self._model}: has no revision {self._revision} at {constants.ENDPOINT}"
            )

        reason = f"{constants.ENDPOINT} answers {refusal.status}: {refusal}"
        if refusal.status in (401, 403, 404):
            return ModelUnusable(
                f"{self._subject} there is no such model, or it is private: {reason}; {token}"
            )

        if refusal.status in PASSING_STATUSES:
            return MayPass(reason, refusal.wait_s)

        return ModelUnusable(f"{self._model}: {reason}")

    @property
    def _subject(self) -> str:
        """The beginning of a message about an id that is perhaps a path."""
        if self._job.wanted.is_adapter:
            return f"{self._model}: no such folder below the model's; as an id of a hub"

        kind = "file" if self._model.names_gguf else "folder"
        return f"no {kind} {self._model} here; as an id of a hub"

    def _offline(self, commit: str | None, lack: str | None) -> StartError:
        """Return the error of a server that may ask no hub and has no cached snapshot that does."""
        set_variables = [name for name in OFFLINE_VARIABLES if os.environ.get(name)]
        variable = set_variables[0] if set_variables else OFFLINE_VARIABLES[0]
        where = f"it is not in the cache {self._cache.folder}"
        if commit is not None:
            where = f"its snapshot {self._cache.snapshots / commit} {lack}"

        rule = (
            f"{variable}={os.environ.get(variable, '')} forbids to ask the hub for revision "
            f"{self._revision}"
        )
        return ModelUnusable(f"{self._subject} {where}, and {rule}")


def _reach(model: HubModel, opened_hosts: Sequence[str]) -> Reach:
    """Return where the hub may send us. Raises ModelUnusable for a hub whose name is no URL."""
    try:
        reach = Reach(constants.ENDPOINT, opened_hosts)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ModelUnusable(
            f"{model}: HF_ENDPOINT={shorten(constants.ENDPOINT)}: {cause_line(error)}"
        ) from error

    if not reach.is_url:
        raise ModelUnusable(
            f"{model}: HF_ENDPOINT={shorten(constants.ENDPOINT)} is no URL of http or https"
        )

    return reach
