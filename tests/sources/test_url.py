"""A GGUF file of a web server: fetched, resumed, kept, and refused in one line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import ModelUnusable, SecurityRefused, SourceUnreachable
from lmi.sources.fetch import fetch
from lmi.sources.fetches import WantedSource
from lmi.sources.job import FetchJob
from lmi.sources.kept import kept_models
from tests.gguf_files import SMALL_FILE, SMALL_PARTS
from tests.sources.faulty_server import Answer, FaultyServer

RANGE = re.compile(r"bytes=(\d+)-")
# Where a server on loopback sends a fetch that may only go there.
ELSEWHERE = "http://127.0.0.2:9/fox.gguf"


class WebServer(FaultyServer):
    """Serves files with an ETag, as web servers do: in ranges, and only if they have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.has_tags = True

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        data = self.files.get(path.partition("?")[0])
        if data is None:
            return Answer(404, body=b"<html>nothing here</html>")

        if not self.has_tags:
            return Answer(body=data)

        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        if headers.get("If-None-Match") == tag:
            return Answer(304, {"ETag": tag})

        asked_range = RANGE.match(headers.get("Range", ""))
        if asked_range is None or headers.get("If-Range") != tag:
            return Answer(200, {"ETag": tag}, data)

        first = int(asked_range[1])
        if first >= len(data):
            return Answer(416)

        content_range = f"bytes {first}-{len(data) - 1}/{len(data)}"
        return Answer(206, {"ETag": tag, "Content-Range": content_range}, data[first:])


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        server.files["/fox.gguf"] = SMALL_FILE
        yield server


def fetched(
    url: str, tmp_path: Path, delays_s: tuple[float, ...] = (0.0,) * 3, **options: Any
) -> Path:
    wanted_source = WantedSource(source=url, download_dir=str(tmp_path), **options)
    return fetch(FetchJob(wanted_source, delays_s=delays_s, spare_bytes=0))


def kept_file(tmp_path: Path, name: str = "fox.gguf") -> Path:
    [file] = tmp_path.glob(f"*/model/{name}")
    return file


def test_a_file_of_a_web_server_is_a_model_and_a_start_without_a_change_brings_no_byte(
    web: WebServer, tmp_path: Path
) -> None:
    url = f"{web.url}/fox.gguf?download=true#top"
    folder = fetched(url, tmp_path)
    assert (folder / "config.json").is_file()

    assert fetched(url, tmp_path) == folder
    assert web.requests == ["GET /fox.gguf?download=true"] * 2
    assert "if-none-match" in web.headers[web.requests[0]]


def test_a_file_that_has_changed_takes_the_place_of_the_kept_one(
    web: WebServer, tmp_path: Path
) -> None:
    url = f"{web.url}/fox.gguf"
    fetched(url, tmp_path)
    web.files["/fox.gguf"] = SMALL_PARTS["small-00001-of-00002.gguf"]
    with pytest.raises(ModelUnusable):
        fetched(url, tmp_path)

    assert kept_file(tmp_path).read_bytes() == web.files["/fox.gguf"]


def test_a_connection_that_breaks_goes_on_where_it_ended(web: WebServer, tmp_path: Path) -> None:
    web.cut("GET /fox.gguf", after=1000)
    fetched(f"{web.url}/fox.gguf", tmp_path)

    assert web.headers["GET /fox.gguf"]["range"] == "bytes=1000-"
    assert kept_file(tmp_path).read_bytes() == SMALL_FILE


def test_the_rest_of_another_file_is_not_added_to_what_arrived(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["/fox.gguf"] = bytes(len(SMALL_FILE))
    web.cut("GET /fox.gguf", after=1000)
    with pytest.raises(SourceUnreachable, match="RemoteProtocolError"):
        fetched(f"{web.url}/fox.gguf", tmp_path, delays_s=())

    web.files["/fox.gguf"] = SMALL_FILE
    fetched(f"{web.url}/fox.gguf", tmp_path)
    assert web.headers["GET /fox.gguf"]["range"] == "bytes=1000-"
    assert kept_file(tmp_path).read_bytes() == SMALL_FILE


def test_a_server_without_etags_is_asked_for_the_whole_file_and_for_no_kept_one(
    web: WebServer, tmp_path: Path
) -> None:
    web.has_tags = False
    web.cut("GET /fox.gguf", after=1000)
    url = f"{web.url}/fox.gguf"
    folder = fetched(url, tmp_path)
    assert "range" not in web.headers["GET /fox.gguf"]

    inode = kept_file(tmp_path).stat().st_ino
    assert fetched(url, tmp_path) == folder
    assert kept_file(tmp_path).stat().st_ino == inode


def test_a_server_that_cannot_be_reached_serves_what_is_kept(
    web: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{web.url}/fox.gguf"
    folder = fetched(url, tmp_path)
    web.fail("GET /fox.gguf", 503)

    assert fetched(url, tmp_path) == folder
    assert "answers 503" in caplog.text and "the kept file is used" in caplog.text


def test_a_split_model_is_all_of_its_files(web: WebServer, tmp_path: Path) -> None:
    web.files = {f"/a%20b/{name}": data for name, data in SMALL_PARTS.items()}
    first = min(SMALL_PARTS)
    folder = fetched(f"{web.url}/a%20b/{first}", tmp_path)

    assert (folder / "config.json").is_file()
    assert web.requests == [f"GET /a%20b/{name}" for name in sorted(SMALL_PARTS)]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (Answer(404), "answers 404"),
        (Answer(403, body=b'{"error": "no\\nway"}'), "answers 403: no way"),
        (
            Answer(200, {"Transfer-Encoding": "chunked"}, b"4\r\nGGUF\r\n0\r\n\r\n"),
            "Content-Length",
        ),
        (Answer(200, {"Content-Length": str(1 << 60)}), "are needed"),
        (Answer(200, {"Content-Encoding": "br"}, b"xy"), "packed as 'br'"),
        (Answer(200, {"Content-Encoding": "gzip"}, b"xy"), "is not the gzip"),
        (Answer(200, body=b"<!DOCTYPE html>"), "fox.gguf"),
        (Answer(302, {"Location": "/fox.gguf"}), "redirects more than 10 times"),
    ],
)
def test_an_answer_that_is_no_file_is_one_line(
    web: WebServer, tmp_path: Path, answer: Answer, line: str
) -> None:
    web.replace("GET /fox.gguf", answer, times=99)
    with pytest.raises(ModelUnusable) as raised:
        fetched(f"{web.url}/fox.gguf?token=secret", tmp_path)

    text = str(raised.value)
    assert line in text
    assert "\n" not in text and "secret" not in text


def test_a_redirect_leads_only_where_it_may(web: WebServer, tmp_path: Path) -> None:
    web.replace("GET /fox.gguf", Answer(302, {"Location": ELSEWHERE}))
    with pytest.raises(SecurityRefused, match="the host and port that the URL names"):
        fetched(f"{web.url}/fox.gguf", tmp_path)

    web.files["/real.gguf"] = SMALL_FILE
    web.replace("GET /fox.gguf", Answer(302, {"Location": "/real.gguf"}))
    assert fetched(f"{web.url}/fox.gguf", tmp_path).is_dir()


def test_an_adapter_is_no_file_of_a_web_server_and_nothing_is_asked(
    web: WebServer, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnusable, match="an adapter is a folder"):
        fetched(f"{web.url}/fox.gguf", tmp_path, is_adapter=True)

    assert web.requests == []


def test_a_file_of_a_web_server_is_listed_and_removed(web: WebServer, tmp_path: Path) -> None:
    fetched(f"{web.url}/fox.gguf?token=secret", tmp_path)
    [model] = kept_models(tmp_path, tmp_path / "hub", {})
    assert (model.name, model.source) == (f"{web.url}/fox.gguf", "url")
    assert model.num_bytes > len(SMALL_FILE)

    model.remove()
    assert kept_models(tmp_path, tmp_path / "hub", {}) == []
