"""The fetch of one file of a hub, which goes on where an earlier one ended."""

from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import httpx2
from huggingface_hub import constants

from lmi.sources.hub_client import HubClient, pieces, raise_for_status
from lmi.sources.hub_file import READ_BYTES, Digest, HubFile
from lmi.sources.job import Damaged, Progress

# Its end is that of the parts of the hub's client, which lists them for who cleans the cache.
PART = ".lmi.incomplete"
# The bytes of one answer, because some hosts of a hub's files send no more at once.
RANGE_BYTES = 40_000_000_000


@dataclass
class Download:
    """One file on its way into the folder of blobs."""

    hub: HubClient
    file: HubFile
    url: str
    headers: dict[str, str]
    folder: Path
    progress: Progress
    range_bytes: int = RANGE_BYTES
    # How many bytes were here at most.
    furthest = 0
    # The bytes in the part, which are those of the digest.
    _num_bytes = 0

    def __post_init__(self) -> None:
        self.whole = self.folder / self.file.id
        self.part = self.folder / f"{self.file.id}{PART}"
        self._digest = Digest(self.file)

    def bring(self) -> None:
        """Fetch what is missing. What arrived stays if the client raises an error. Raises Damaged
        or Stopped too.
        """
        try:
            with open(self.part, "ab") as out:
                if out.tell() != self._num_bytes:
                    self._take_up(out)

                while self._num_bytes < self.file.size:
                    self._read(out)

            if not self._digest.is_right:
                raise Damaged(wanted=self._digest.wanted, found=self._digest)
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

        with open(self.part, "rb") as part:
            while data := part.read(READ_BYTES):
                self._count(data)

    def _read(self, out: BufferedWriter) -> None:
        """Ask once, for the rest of the file or the next part of a very large one."""
        first = self._num_bytes
        end = min(first + self.range_bytes, self.file.size)
        headers = self.headers | {"Accept-Encoding": "identity"}
        if first or end < self.file.size:
            last = "" if end == self.file.size else end - 1
            headers["Range"] = f"bytes={first}-{last}"

        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with self.hub.get(self.url, headers, silence_s=limit_s) as response:
            if first and _begins_elsewhere(response, first):
                self._forget()
                out.truncate(0)
                if response.status_code != 200:
                    return

            raise_for_status(response)
            for data in pieces(response):
                if self._num_bytes + len(data) > self.file.size:
                    raise Damaged(wanted=f"{self.file.size} bytes", found="more")

                out.write(data)
                # What arrived stays, also if the process is killed.
                out.flush()
                self._count(data)

        if self._num_bytes < end:
            raise Damaged(wanted=f"{self.file.size} bytes", found=self._num_bytes)

    def _count(self, data: bytes) -> None:
        """Count bytes that are in the part now."""
        self.progress.add(len(data))
        self._digest.update(data)
        self._num_bytes += len(data)
        self.furthest = max(self.furthest, self._num_bytes)

    def _forget(self) -> None:
        """Count the bytes of the part as not fetched."""
        self.progress.add(-self._num_bytes)
        self._digest = Digest(self.file)
        self._num_bytes = 0


def _begins_elsewhere(response: httpx2.Response, first: int) -> bool:
    """Return whether an answer to a request for the bytes from `first` on has other bytes, or says
    that there are none. Another error says nothing about the bytes.
    """
    if response.status_code == 206:
        range_text = response.headers.get("Content-Range", "")
        return not range_text.startswith(f"bytes {first}-")

    return response.status_code in (200, 416)
