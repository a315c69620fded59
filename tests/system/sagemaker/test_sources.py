"""A server whose model is elsewhere: it answers while the model is fetched, and serves it when it
is here.
"""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.settings.served_folder import demo_folder
from tests.machine import measurements
from tests.served import launch
from tests.sources.hub_server import HubServer
from tests.sources.s3_server import S3Server, moto
from tests.system.container import wait_until

ID = "someone/a-demo"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def publish(hub: HubServer) -> None:
    hub.publish(
        ID, {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()}
    )


def environ(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    # The tests' servers have it set
    offline = {"HF_HUB_OFFLINE": "0"}
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "SERVING_LOG_FORMAT": "json",
        **offline,
    }


def test_an_id_of_a_hub_is_all_that_serve_needs(hub: HubServer, tmp_path: Path) -> None:
    publish(hub)
    with launch(Path(ID), environ(hub, tmp_path)) as server:
        server.wait_ready()
        assert server.post({"inputs": "The fox"}).status == 200
        assert json.loads(server.request("GET", "/v1/models").body)["data"][0]["id"] == "a-demo"
        assert "fetching someone/a-demo" in server.log.read_text()


def test_the_port_answers_while_the_model_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    publish(hub)
    rule = hub.hold("GET .*safetensors", after=1000, times=9)
    with launch(Path(ID), environ(hub, tmp_path)) as server:
        wait_until(lambda: server.ping() == 503, "the front end answers")
        loading = json.loads(server.request("GET", "/ping").body)

        assert (loading["status"], loading["stage"]) == ("Loading", "download")
        assert server.post({"inputs": "The fox"}).status == 503
        assert server.request("GET", "/v2/health/live").status == 200

        rule.released.set()
        server.wait_ready()

        assert server.post({"inputs": "The fox"}).status == 200


def test_sigterm_ends_a_download_at_once(hub: HubServer, tmp_path: Path) -> None:
    publish(hub)
    hub.hold("GET .*safetensors", after=1000, times=9)
    for measurement in measurements():
        with launch(Path(ID), environ(hub, tmp_path)) as server:
            wait_until(lambda: server.ping() == 503, "the front end answers")
            with measurement.within(2.5):
                server.signal(signal.SIGTERM)
                assert server.wait() == 0

            assert server.pids() == []


def test_a_model_that_the_hub_does_not_have_ends_the_start_with_its_name(
    hub: HubServer, tmp_path: Path
) -> None:
    with launch(Path(ID), environ(hub, tmp_path)) as server:
        assert server.wait(60) == 4
        words = server.last_words()
        assert (words["stage"], words["code"]) == ("download", 4) and ID in words["message"]
        assert "HF_TOKEN is not set" in words["message"]


def test_a_model_whose_settings_are_impossible_ends_the_start_after_the_download(
    hub: HubServer, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()}
    hub.publish(ID, files | {"config.json": b"{"})
    with launch(Path(ID), environ(hub, tmp_path)) as server:
        assert server.wait(60) == 4
        assert "config.json" in server.last_words()["message"]


def test_a_fetch_process_that_is_killed_starts_again(hub: HubServer, tmp_path: Path) -> None:
    publish(hub)
    rule = hub.hold("GET .*safetensors", after=1000, times=9)
    with launch(Path(ID), environ(hub, tmp_path)) as server:
        first = server.pid("lmi-fetch")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.pids("lmi-fetch") not in ([], [first]), "another one runs")
        rule.released.set()
        server.wait_ready()


# Models in S3.


@pytest.fixture(scope="module")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture
def s3(moto_port: int, tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(moto_port) as server:
        server.client.create_bucket(Bucket=tmp_path.name)
        yield server


def from_s3(s3: S3Server, tmp_path: Path, key: str, **more: str) -> dict[str, str]:
    """The environment of a server whose model is in S3."""
    source = {
        "HF_MODEL_ID": f"s3://{tmp_path.name}/{key}",
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads"),
    }
    return {**s3.environ, **source, "SERVING_LOG_FORMAT": "json", **more}


def packed(folder: Path, **more: bytes) -> bytes:
    """An archive as SageMaker's SDK makes one, of a folder and of further files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(
            folder, "top", filter=lambda member: None if "__pycache__" in member.name else member
        )
        for name, data in more.items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

    return buffer.getvalue()


@pytest.mark.parametrize("key", ["team/demo/", "team/demo.tar.gz"])
def test_a_prefix_or_an_archive_of_s3_is_served_and_not_fetched_again(
    s3: S3Server, tmp_path: Path, key: str
) -> None:
    files = {
        f"team/demo/{path.name}": path.read_bytes()
        for path in demo_folder().iterdir()
        if path.is_file()
    }
    s3.put(tmp_path.name, {**files, "team/demo.tar.gz": packed(demo_folder())})
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        with launch(tmp_path / "empty", from_s3(s3, tmp_path, key)) as server:
            server.wait_ready()
            assert server.post({"inputs": "The fox"}).status == 200
            assert json.loads(server.request("GET", "/v1/models").body)["data"][0]["id"] == "demo"

    weights = "model.safetensors" if key.endswith("/") else "demo.tar.gz"
    assert s3.num_requests(f"GET .*/{weights}") == 1


def test_a_pickle_in_an_archive_of_s3_ends_the_start_in_secure_mode(
    s3: S3Server, tmp_path: Path
) -> None:
    s3.put(tmp_path.name, {"demo.tgz": packed(demo_folder(), **{"deep/extra.PKL": b""})})
    (tmp_path / "empty").mkdir()
    secure = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
    }
    with launch(tmp_path / "empty", from_s3(s3, tmp_path, "demo.tgz", **secure)) as server:
        assert server.wait(60) == 5

        words = server.last_words()
        assert (words["cause"], words["code"]) == ("security_refused", 5)
        assert str(words["message"]).endswith("deep/extra.PKL: refused by DISALLOW_PICKLE_FILES")
