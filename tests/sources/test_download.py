"""One file of a hub, fetched in this process from a server on loopback."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lmi.sources.hub_client import HubClient
from lmi.sources.hub_download import Download
from lmi.sources.hub_file import HubFile
from lmi.sources.job import Damaged, Progress, Stopped
from lmi.sources.reach import Reach
from tests.sources.faulty_server import Answer
from tests.sources.hub_server import HubServer

DATA = bytes(range(256)) * 40


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with closing(HubClient("a/b", Reach(hub.url))) as client:
        yield client


def download(
    hub: HubServer, client: HubClient, folder: Path, range_bytes: int = 1 << 30
) -> Download:
    hub.publish("a/b", {"model.safetensors": DATA})
    sha256 = hashlib.sha256(DATA).hexdigest()
    file = HubFile("model.safetensors", len(DATA), sha256, sha256)
    url = f"{hub.url}/a/b/resolve/main/model.safetensors"
    return Download(client, file, url, {}, folder, Progress(), range_bytes)


def test_a_file_larger_than_one_answer_is_fetched_in_several(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    transfer = download(hub, client, tmp_path, range_bytes=4096)
    transfer.bring()
    assert transfer.whole.read_bytes() == DATA
    assert hub.num_requests("GET") == 3


def test_a_part_as_long_as_the_file_is_only_checked(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    transfer = download(hub, client, tmp_path)
    transfer.part.write_bytes(DATA)
    transfer.bring()
    assert transfer.whole.read_bytes() == DATA and not transfer.part.exists()
    assert hub.requests == []


@pytest.mark.parametrize("length", [1, 100_000], ids=["short", "long"])
def test_a_part_of_another_length_is_continued_or_dropped(
    hub: HubServer, client: HubClient, tmp_path: Path, length: int
) -> None:
    transfer = download(hub, client, tmp_path)
    transfer.part.write_bytes((DATA * 10)[:length])
    transfer.bring()
    assert transfer.whole.read_bytes() == DATA


@pytest.mark.parametrize(
    "answer",
    [
        Answer(416),
        Answer(206, {"Content-Range": "bytes 0-10239/10240"}, DATA),
        Answer(206, {}, DATA[5000:]),
        Answer(200, {}, DATA),
    ],
    ids=["refused", "from the start", "unknown", "whole"],
)
def test_an_answer_with_other_bytes_than_asked_for_does_not_spoil_the_file(
    hub: HubServer, client: HubClient, tmp_path: Path, answer: Answer
) -> None:
    transfer = download(hub, client, tmp_path)
    transfer.part.write_bytes(DATA[:5000])
    hub.replace("GET", answer)
    transfer.bring()
    assert transfer.whole.read_bytes() == DATA


def test_more_bytes_than_the_listing_has_are_not_written(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    transfer = download(hub, client, tmp_path)
    hub.replace("GET", Answer(200, {}, DATA * 100))
    with pytest.raises(Damaged, match="wanted 10240 bytes, found more"):
        transfer.bring()

    assert list(tmp_path.iterdir()) == []


def test_a_download_stops_when_another_failed_and_keeps_what_it_has(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    transfer = download(hub, client, tmp_path)
    transfer.progress.stopped.set()
    with pytest.raises(Stopped):
        transfer.bring()

    assert DATA.startswith(transfer.part.read_bytes())
