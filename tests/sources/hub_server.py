"""A small hub: repositories with revisions, over the routes that the hub's client uses to fetch a
model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from tests.sources.faulty_server import Answer, FaultyServer

Files = Mapping[str, bytes]


class HubServer(FaultyServer):
    def __init__(self) -> None:
        super().__init__()
        # By id and commit
        self._commits: dict[tuple[str, str], Files] = {}
        # Commit by id and name
        self._revisions: dict[tuple[str, str], str] = {}
        # Needed for every answer
        self.token: str | None = None
        # Ids whose files need a licence
        self.gated: set[str] = set()
        # By path, instead of the real size
        self.listed_sizes: dict[str, int] = {}
        # Of so many requests one is answered with 503
        self.fails_each: int | None = None
        # Parts of files can be asked for
        self.has_ranges = True
        # Small files are named as git names them; a mirror may name them by the hash of their bytes
        self.has_git = True
        # Another hub, to which requests for large files are redirected
        self.files_at: str | None = None

    def publish(self, id: str, files: Files, revision: str = "main") -> str:
        """Make a commit and let the revision mean it. Returns the commit."""
        commit = hashlib.sha1(repr((id, sorted(files.items()))).encode()).hexdigest()
        self._commits[id, commit] = dict(files)
        self._revisions[id, revision] = commit
        return commit

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if self.fails_each and len(self.requests) % self.fails_each == 0:
            return _error(503, "busy")

        if self.token is not None and headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "Invalid username or password.")

        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api(parts[2:])

        if "resolve" in parts:
            at = parts.index("resolve")
            return self._file(
                "/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]), headers
            )

        return _error(404, "no such page")

    def _api(self, parts: list[str]) -> Answer:
        for word in ("revision", "tree"):
            if word in parts:
                at = parts.index(word)
                id = "/".join(parts[:at])
                revision = "/".join(parts[at + 1 :])
                break
        else:
            word = "revision"
            id = "/".join(parts)
            revision = "main"

        if not any(known_id == id for known_id, _ in self._commits):
            return _error(404, "Repository not found", "RepoNotFound")

        commit = self._commit(id, revision)
        if commit is None:
            return _error(404, f"Invalid rev id: {revision}", "RevisionNotFound")

        return _json(
            self._tree(id, commit) if word == "tree" else {"id": id, "modelId": id, "sha": commit}
        )

    def _tree(self, id: str, commit: str) -> list[dict[str, object]]:
        files = self._commits[id, commit]
        return [self._entry(path, data) for path, data in files.items()]

    def _entry(self, path: str, data: bytes) -> dict[str, object]:
        """A file of a listing. Of a large one git has only a pointer, and the hub names the SHA-256
        of its bytes.
        """
        size = self.listed_sizes.get(path, len(data))
        entry = {"type": "file", "path": path, "size": size, "oid": self._id_of(data)}
        if not _is_large(path):
            return entry

        return entry | {"lfs": {"oid": self._etag(path, data), "size": size, "pointerSize": 130}}

    def _etag(self, path: str, data: bytes) -> str:
        if _is_large(path):
            return hashlib.sha256(data).hexdigest()

        return self._id_of(data)

    def _id_of(self, data: bytes) -> str:
        if self.has_git:
            return git_id(data)

        return hashlib.sha1(data).hexdigest()

    def _commit(self, id: str, revision: str) -> str | None:
        return revision if (id, revision) in self._commits else self._revisions.get((id, revision))

    def _file(self, id: str, revision: str, path: str, headers: Mapping[str, str]) -> Answer:
        commit = self._commit(id, revision)
        if commit is None:
            return _error(404, "Repository not found", "RepoNotFound")

        if id in self.gated:
            return _error(403, f"Access to model {id} is restricted.", "GatedRepo")

        if (data := self._commits[id, commit].get(path)) is None:
            return _error(404, "Entry not found", "EntryNotFound")

        head = {
            "ETag": f'"{self._etag(path, data)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if self.files_at is not None and _is_large(path):
            return Answer(
                302, head | {"Location": f"{self.files_at}/{id}/resolve/{revision}/{path}"}
            )

        if (range := headers.get("Range")) is None or not self.has_ranges:
            return Answer(200, head | {"Content-Length": str(len(data))}, data)

        first, last = range.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1 if last else None]
        head["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return (
            Answer(206, head, part)
            if part
            else Answer(416, {"Content-Range": f"bytes */{len(data)}"})
        )


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _error(status: int, message: str, code: str = "") -> Answer:
    headers = {"X-Error-Message": message, "Content-Type": "application/json"} | (
        {"X-Error-Code": code} if code else {}
    )
    return Answer(status, headers, json.dumps({"error": message}).encode())
