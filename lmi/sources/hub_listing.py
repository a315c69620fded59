"""What a hub lists of a repository: the commit of a revision, and its files.

    GET /api/models/ID/revision/REVISION            {"sha": COMMIT, …}
    GET /api/models/ID/tree/COMMIT?recursive=true   [{"type": "file", "path": …, "size": …,
                                                      "oid": …, "lfs": …}, …]
    GET /ID/resolve/COMMIT/PATH                     the bytes of a file, mostly after a redirect

A long list comes in pages. The cursor of the next one stands in the Link field, as the query of its
URL. Sources: the hub's OpenAPI document, RFC 8288.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated
from urllib.parse import quote

import httpx2
import msgspec

from lmi.errors import shorten
from lmi.sources.hub_client import HubClient, NoHub
from lmi.sources.hub_file import ID, SHA256, HubFile

COMMIT = re.compile(r"[0-9a-f]{40}")
# The bytes of all pages. 100,000 files have 35 MB.
MAX_LISTING_BYTES = 64 << 20
MAX_PAGES = 1_000
MAX_FILES = 100_000


class _Revision(msgspec.Struct):
    sha: str


class _Pointer(msgspec.Struct):
    oid: str


class _Entry(msgspec.Struct, rename="camel"):
    """A file or folder of a listing."""

    type: str
    path: str
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    oid: str = ""
    lfs: _Pointer | None = None
    xet_hash: str | None = None

    def file(self) -> HubFile:
        """Return the file that this entry describes. Raises NoHub for an id that is none: it
        becomes a file's name.
        """
        if self.lfs is None:
            if not ID.fullmatch(self.oid):
                raise self._bad_id(self.oid)

            return HubFile(self.path, self.size, self.oid, xet_hash=self.xet_hash)

        sha256 = self.lfs.oid
        if not SHA256.fullmatch(sha256):
            raise self._bad_id(sha256 or self.oid)

        pointer_id = self.oid if ID.fullmatch(self.oid) else None
        return HubFile(self.path, self.size, sha256, sha256, self.xet_hash, pointer_id)

    def _bad_id(self, id: str) -> NoHub:
        return NoHub(f"it lists {shorten(self.path)} with the id {shorten(id)}")


class HubApi:
    """What is asked of the API of one hub about one repository. `count` gets the bytes of its
    answers.
    """

    def __init__(
        self,
        client: HubClient,
        endpoint: str,
        id: str,
        headers: Mapping[str, str],
        count: Callable[[int], None],
    ) -> None:
        self._client = client
        self._repository = f"{endpoint}/api/models/{id}"
        self._files = f"{endpoint}/{id}/resolve"
        self._headers = headers
        self._count = count

    def commit_of(self, revision: str) -> str:
        """Return the commit that a branch, tag or commit means."""
        url = f"{self._repository}/revision/{quote(revision, safe='')}"
        answer = self._client.answer(url, self._headers, _Revision, count=self._count)
        commit = answer.value.sha
        if not COMMIT.fullmatch(commit):
            raise NoHub(f"it names the commit {shorten(commit)}")

        return commit

    def files_of(self, commit: str) -> list[HubFile]:
        """Return the files of a commit, from all pages of its listing."""
        files: list[HubFile] = []
        for entries in self._pages(f"{self._repository}/tree/{commit}"):
            files += [entry.file() for entry in entries if entry.type == "file"]
            if len(files) > MAX_FILES:
                raise NoHub(f"it lists more than {MAX_FILES} files")

        return files

    def url_of(self, commit: str, file: HubFile) -> str:
        return f"{self._files}/{commit}/{quote(file.path)}"

    def _pages(self, url: str) -> Iterator[list[_Entry]]:
        """Yield the pages of a list. Whatever URL the hub names for the next one, only its query
        counts.
        """
        query = "?recursive=true&expand=false"
        left_bytes = MAX_LISTING_BYTES
        for _ in range(MAX_PAGES):
            answer = self._client.answer(
                url + query,
                self._headers,
                list[_Entry],
                left_bytes=left_bytes,
                count=self._count,
            )
            yield answer.value

            left_bytes -= answer.num_bytes
            next_query = _next_query(answer.response)
            if next_query is None:
                return

            query = f"?{next_query}"

        raise NoHub(f"its list of files has more than {MAX_PAGES} pages")


def _next_query(response: httpx2.Response) -> str | None:
    """Return the query of the next page of a list, or None after the last."""
    target = response.links.get("next", {}).get("url")
    if target is None:
        return None

    try:
        return httpx2.URL(target).query.decode("ascii")
    except (httpx2.InvalidURL, ValueError) as error:
        raise NoHub(f"it names {shorten(target)} as the next page of its list") from error
