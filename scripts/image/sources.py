"""A model hub and an S3 with one model each, on the loopback, for a container that fetches its
model.

Both answer what their clients ask to list and read files, with Range, and nothing else.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# the hub's name of the model; the bucket, in which it has the prefix demo/
MODEL = "lmi/demo"
BUCKET = "models"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def model_sources(folder: Path) -> Iterator[str]:
    """Serve the files of a folder as a hub's repository and as objects of S3. Yield the URL of
    both.
    """
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    handler = type("Handler", (_Handler,), {"files": files})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        query = parse_qs(parts.query)
        if re.fullmatch(rf"/api/models/{MODEL}(/revision/[^/]+)?", path):
            self._send_json(
                {
                    "id": MODEL,
                    "sha": COMMIT,
                    "siblings": [{"rfilename": name} for name in self.files],
                }
            )
        elif path.startswith(f"/api/models/{MODEL}/tree/"):
            self._send_json([_tree_entry(name, data) for name, data in self.files.items()])
        elif match := re.fullmatch(rf"/{MODEL}/resolve/[^/]+/([^/]+)", path):
            self._send_file(match[1])
        elif path.rstrip("/") == f"/{BUCKET}" and "list-type" in query:
            self._send(
                200,
                _listing(self.files, query.get("prefix", [""])[0]),
                {"Content-Type": "application/xml"},
            )
        elif match := re.fullmatch(rf"/{BUCKET}/demo/([^/]+)", path):
            self._send_file(match[1])
        else:
            self._send(404, b"")

    do_HEAD = do_GET

    def _send_file(self, name: str) -> None:
        data = self.files.get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return

        headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self._send(200, data, headers)
            return

        first = int(match[1])
        last = min(int(match[2] or len(data)), len(data) - 1)
        self._send(
            206,
            data[first : last + 1],
            headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"},
        )

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)

        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Drop the log."""


def _digest(data: bytes) -> str:
    # As S3 makes the ETag of a small object
    return hashlib.md5(data).hexdigest()


def _tree_entry(name: str, data: bytes) -> dict:
    return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}


def _listing(files: dict[str, bytes], prefix: str) -> bytes:
    objects = {
        f"demo/{name}": data for name, data in files.items() if f"demo/{name}".startswith(prefix)
    }
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>&quot;{_digest(data)}&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
        for key, data in objects.items()
    )
    head = (
        f"<Name>{BUCKET}</Name><KeyCount>{len(objects)}</KeyCount><IsTruncated>false</IsTruncated>"
    )
    return f'<?xml version="1.0"?><ListBucketResult>{head}{entries}</ListBucketResult>'.encode()
