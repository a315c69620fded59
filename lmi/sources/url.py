"""Fetches a GGUF file of a web server, or the files of a split model, to a folder in
`download_dir`.

    H/url                   what `lmi list` shows
    H/model/NAME.gguf       a whole file
    H/notes/NAME.gguf       what the server said of it
    H/parts/NAME.gguf       a file of which some bytes came, and H/parts/NAME.gguf.json its note
    H.lock                  one process fetches at a time

H is sha256 of the URL. What arrived stays, and the next try or process asks only for the rest if
the file has an ETag. A whole file is fetched anew only if the server says that it has changed.
Source: RFC 9110 (conditional requests, ranges).
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import BufferedWriter
from pathlib import Path

import httpx2
import msgspec

from lmi.errors import ModelUnusable, SourceUnreachable, cause_line
from lmi.shared.files import write_whole
from lmi.sources.fetches import read
from lmi.sources.files_on_disk import size_of
from lmi.sources.hub_client import HubClient, HubRefusal, NoHub, pieces, raise_for_status
from lmi.sources.job import PASSING_STATUSES, Damaged, FetchJob, MayPass, attempt
from lmi.sources.paths import check_path
from lmi.sources.place import Place
from lmi.sources.reach import Reach, origin
from lmi.sources.source import UrlModel

UNCHANGED = 304
PARTIAL = 206
NO_SUCH_RANGE = 416

log = logging.getLogger(__name__)


class Note(msgspec.Struct, frozen=True):
    """What a server said of a file when it sent the file."""

    num_bytes: int
    # Its ETag, or "".
    tag: str
    # When it was changed, as the server wrote it, or "".
    changed: str

    def condition(self) -> dict[str, str]:
        """Return headers that ask for the file only if it has changed."""
        if self.tag:
            return {"If-None-Match": self.tag}

        return {"If-Modified-Since": self.changed} if self.changed else {}

    def rest(self, first: int) -> dict[str, str]:
        """Return headers that ask for the bytes from `first` on if the file has not changed, or
        none where the server gave nothing to tell that by.
        """
        if not self.tag or self.tag.startswith("W/"):
            return {}

        return {"Range": f"bytes={first}-", "If-Range": self.tag}


class UrlFetch:
    """The fetch of one URL."""

    def __init__(self, model: UrlModel, job: FetchJob) -> None:
        folder = Path(job.wanted.download_dir).absolute()

        self._model = model
        self._job = job

        self._folder = folder / hashlib.sha256(model.url.encode()).hexdigest()
        self._place = Place(folder, "SERVING_DOWNLOAD_DIR", model, job.spare_bytes)
        self._client = HubClient(model, _reach(model, job.wanted.opened_hosts))

    def fetch(self) -> Path:
        """Return the GGUF file, of a split model the first, as the server has it now, or the kept
        one if the server cannot be reached.
        """
        files = self._files()
        with self._place.only_one(self._folder.with_suffix(".lock")), closing(self._client):
            with self._place.writing():
                for name in ("model", "notes", "parts"):
                    (self._folder / name).mkdir(parents=True, exist_ok=True)

                write_whole(self._folder / "url", str(self._model).encode())

            for file in files:
                self._bring(file)

        return files[0].whole

    def _files(self) -> list["UrlFile"]:
        files: list[UrlFile] = []
        for part in self._model.parts():
            check_path(str(self._model), part.name)
            files.append(
                UrlFile(part.name, part.url, self._folder, self._client, self._place, self._job)
            )

        return files

    def _bring(self, file: "UrlFile") -> None:
        # With a kept file one try is enough.
        delays_s = () if file.kept is not None else self._job.delays_s
        try:
            attempt(
                self._explained()(file.bring),
                self._model,
                delays_s,
                reached=lambda: file.furthest,
            )
        except SourceUnreachable as error:
            if file.kept is None:
                raise

            cause = error.__cause__
            log.warning("%s: it cannot be reached (%s), the kept file is used", self._model, cause)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what goes wrong with a server into MayPass or an error that says what is wrong for
        good.
        """
        where = origin(httpx2.URL(self._model.url))
        try:
            yield
        except HubRefusal as error:
            reason = f"{where} answers {error.status}: {error}"
            if error.status in PASSING_STATUSES:
                raise MayPass(reason, error.wait_s) from error

            raise ModelUnusable(f"{self._model}: {reason}") from error
        except httpx2.HTTPError as error:
            reason = f"{where}: {type(error).__name__}: {cause_line(error)}"
            raise MayPass(reason) from error
        except (NoHub, httpx2.InvalidURL) as error:
            raise ModelUnusable(f"{self._model}: {cause_line(error)}") from error


class UrlFile:
    """One file on its way."""

    def __init__(
        self, name: str, url: str, folder: Path, client: HubClient, place: Place, job: FetchJob
    ) -> None:
        self.whole = folder / "model" / name
        self._note = folder / "notes" / name
        self._part = folder / "parts" / name
        self._note_of_part = folder / "parts" / f"{name}.json"
        self._url = url
        self._client = client
        self._place = place
        self._progress = job.progress
        # How many bytes were here at most.
        self.furthest = 0

    @property
    def kept(self) -> Note | None:
        """The note of the whole file, if it is here."""
        note = _read_note(self._note)
        return note if note is not None and size_of(self.whole) == note.num_bytes else None

    def bring(self) -> None:
        """Fetch the file, or its rest, unless the whole one is here and has not changed.

        Raises Damaged for more or fewer bytes than were promised, and what the client raises.
        """
        kept = self.kept
        first = size_of(self._part) or 0
        note = _read_note(self._note_of_part)
        condition = kept.condition() if kept is not None else {}
        if note is not None and first:
            condition = note.rest(first) or condition

        with self._client.get(self._url, {"Accept-Encoding": "identity", **condition}) as response:
            if kept is not None and response.status_code == UNCHANGED:
                return

            if response.status_code == NO_SUCH_RANGE:
                self._part.unlink(missing_ok=True)
                raise Damaged(wanted="the rest of the file", found="no such bytes")

            raise_for_status(response)
            if kept is not None and kept == _note_of(response, 0):
                return

            goes_on = response.status_code == PARTIAL and _begins_at(response, first)
            self._read(response, first if goes_on else 0)

    def _read(self, response: httpx2.Response, first: int) -> None:
        """Add the bytes of an answer to the first ones that are here, and give the file its
        name.
        """
        note = _note_of(response, first)
        missing_bytes = note.num_bytes - first
        self._place.check_room(missing_bytes)
        self._progress.begin(self._place.source, note.num_bytes, 1)
        self._progress.add(first)
        with self._place.writing(missing_bytes):
            write_whole(self._note_of_part, msgspec.json.encode(note))
            with self._part.open("ab") as out:
                out.truncate(first)
                self._write(response, note, out)

            # The file goes first: with the note of another one it is fetched anew.
            self._part.replace(self.whole)
            self._note_of_part.replace(self._note)

        self._progress.file_done()

    def _write(self, response: httpx2.Response, note: Note, out: BufferedWriter) -> None:
        for data in pieces(response):
            out.write(data)
            # What arrived stays, also if the process is killed.
            out.flush()
            self._progress.add(len(data))
            self.furthest = max(self.furthest, out.tell())

        if out.tell() != note.num_bytes:
            raise Damaged(wanted=f"{note.num_bytes} bytes", found=out.tell())


def _read_note(file: Path) -> Note | None:
    try:
        return read(file, Note)
    except ValueError:
        return None


def _note_of(response: httpx2.Response, first: int) -> Note:
    """Return the note of the file that an answer has from byte `first` on. Raises NoHub if the
    answer does not say how long it is.
    """
    headers = response.headers
    length = headers.get("Content-Length", "")
    if not length.isdecimal():
        raise NoHub("the answer does not say how many bytes the file has (Content-Length)")

    tag = headers.get("ETag", "")
    return Note(first + int(length), tag=tag, changed=headers.get("Last-Modified", ""))


def _begins_at(response: httpx2.Response, first: int) -> bool:
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {first}-")


def _reach(model: UrlModel, opened_hosts: tuple[str, ...]) -> Reach:
    """Return where the server may send us. Raises ModelUnusable for a text that is no URL."""
    try:
        reach = Reach(model.url, opened_hosts, named_by="the URL")
    except (httpx2.InvalidURL, ValueError) as error:
        raise ModelUnusable(f"{model}: {cause_line(error)}") from error

    if not reach.is_url:
        raise ModelUnusable(f"{model}: is no URL of http or https with a host")

    return reach
