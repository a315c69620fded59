"""A repository of a hub becomes a folder of the cache, in this process: what is checked, and what
stays for later.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from lmi.errors import ModelUnusable, SecurityRefused, StartError
from lmi.sources.fetch import fetch
from lmi.sources.fetches import WantedSource
from lmi.sources.job import FetchJob
from tests.sources.faulty_server import Answer
from tests.sources.fetching import contents, model_files
from tests.sources.hub_server import HubServer, git_id

ID = "writers/fox"
CONFIG = model_files()["config.json"]
WRONG = CONFIG.replace(b"llama", b"lxxxa")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--writers--fox" / "blobs"


def fetched(*opened_hosts: str, revision: str | None = None) -> Path:
    wanted_source = WantedSource(
        source=ID, revision=revision, download_dir="/d", opened_hosts=opened_hosts
    )
    return fetch(FetchJob(wanted_source, delays_s=(), spare_bytes=0))


def test_a_small_file_with_other_bytes_is_fetched_once_more(hub: HubServer) -> None:
    hub.publish(ID, model_files())
    hub.replace("GET .*/config.json", Answer(200, {}, WRONG))
    assert contents(fetched()) == model_files()


def test_a_small_file_with_other_bytes_is_no_trouble_for_the_start_after_the_hub_is_mended(
    hub: HubServer, blobs: Path
) -> None:
    hub.publish(ID, model_files())
    hub.replace("GET .*/config.json", Answer(200, {}, WRONG), times=2)
    with pytest.raises(
        ModelUnusable,
        match=rf"config.json: wanted git id {git_id(CONFIG)}, found {git_id(WRONG)}, tw",
    ):
        fetched()

    assert not (blobs / git_id(CONFIG)).exists()
    assert contents(fetched()) == model_files()


@pytest.mark.parametrize("is_kept", [True, False], ids=["listing", "links alone"])
def test_a_wrong_small_file_in_the_cache_is_fetched_anew(
    hub: HubServer, blobs: Path, caplog: pytest.LogCaptureFixture, is_kept: bool
) -> None:
    commit = hub.publish(ID, model_files())
    fetched()
    (blobs / git_id(CONFIG)).write_bytes(WRONG)
    if not is_kept:
        (blobs.parent / "trees" / f"{commit}.json").unlink()

    with caplog.at_level(logging.WARNING):
        assert contents(fetched(revision=commit)) == model_files(), (
            "also where a cached commit asks nobody"
        )

    assert "the cache has other bytes of config.json" in caplog.text
    assert hub.num_requests("GET .*/resolve/") == len(model_files()) + 1


def test_a_wrong_small_file_in_the_cache_is_named_where_nobody_may_be_asked(
    hub: HubServer, blobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish(ID, model_files())
    fetched()
    (blobs / git_id(CONFIG)).write_bytes(WRONG)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelUnusable,
        match="has other bytes of config.json: wanted git id .* forbids to ask the hub",
    ):
        fetched()


def test_a_large_file_is_compared_with_its_sha_256_whatever_was_kept(
    hub: HubServer, blobs: Path
) -> None:
    hub.publish(ID, model_files(1000))
    folder = fetched()
    blob = (folder / "model.safetensors").resolve()
    blob.unlink()
    hub.replace("GET .*/model.safetensors", Answer(200, {}, bytes(1000)))
    assert contents(fetched()) == model_files(1000)
    assert {path.name for path in blobs.iterdir()} >= {blob.name}
    assert len(blob.name) == 64


def test_a_kept_listing_that_is_wrong_is_read_anew(hub: HubServer, blobs: Path) -> None:
    commit = hub.publish(ID, model_files())
    fetched()
    stored_tree = blobs.parent / "trees" / f"{commit}.json"
    listing = json.loads(stored_tree.read_bytes())
    listing["files"]["config.json"]["size"] += 1
    stored_tree.write_text(json.dumps(listing))
    assert contents(fetched()) == model_files()
    assert json.loads(stored_tree.read_bytes())["files"]["config.json"]["size"] == len(CONFIG)


def test_the_hubs_client_reads_the_listing_that_is_kept(hub: HubServer) -> None:
    from huggingface_hub import get_cached_repo_tree

    commit = hub.publish(ID, model_files())
    fetched()
    stored_tree = get_cached_repo_tree(ID, revision=commit, cache_dir=constants.HF_HUB_CACHE)
    assert {file.path: file.size for file in stored_tree} == {
        path: len(data) for path, data in model_files().items()
    }


def test_a_mirror_without_git_may_name_a_file_by_the_hash_of_its_bytes(hub: HubServer) -> None:
    hub.has_git = False
    hub.publish(ID, model_files())
    assert contents(fetched()) == model_files()


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("x\n.json", SecurityRefused, r"the path 'x\n.json' has control characters"),
        ("a\x1b[2J.json", SecurityRefused, r"the path 'a\x1b[2J.json' has control characters"),
        ("a\u202enosj.json", SecurityRefused, r"has control characters"),
        ("..\\..\\x.json", SecurityRefused, "..\\..\\x.json is not a path inside it"),
        (
            "n" * 5000 + ".json",
            ModelUnusable,
            "a path has at most 1024 bytes, 240 in each of its names",
        ),
        ("a/" * 40 + "x.json", ModelUnusable, "has 86 bytes, 6 in its longest name, and 41 names"),
    ],
    ids=["newline", "escape", "direction", "backslash", "long", "deep"],
)
def test_a_path_that_no_file_of_a_model_has_is_refused_before_a_byte_is_fetched(
    hub: HubServer, path: str, kind: type[StartError], said: str
) -> None:
    hub.publish(ID, model_files() | {path: b"x"})
    with pytest.raises(kind) as raised:
        fetched()

    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert hub.num_requests("/resolve/") == 0


def test_names_that_are_not_taken_do_not_spoil_the_line_about_them(hub: HubServer) -> None:
    hub.publish(ID, {"a\nb.md": b"x"})
    with pytest.raises(ModelUnusable, match=r"holds 'a\\nb\.md'; a model has config\.json"):
        fetched()


def test_a_file_is_redirected_only_to_a_host_that_is_named(hub: HubServer) -> None:
    hub.publish(ID, model_files())
    with HubServer() as second_hub:
        second_hub.publish(ID, model_files())
        hub.files_at = second_hub.url
        place = second_hub.url.removeprefix("http://")
        with pytest.raises(
            SecurityRefused, match=f"{ID}: it redirects to .*download_hosts={place} allows it"
        ):
            fetched()

        assert second_hub.requests == []
        assert contents(fetched(place)) == model_files()
        assert len(second_hub.requests) == 1


@pytest.mark.parametrize(
    "endpoint", ["huggingface.co", "ftp://hub", "http://", "http://[", "http://a b"]
)
def test_a_hub_whose_name_is_no_url_is_one_line(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(StartError) as raised:
        fetched()

    assert "HF_ENDPOINT" in str(raised.value) or endpoint in str(raised.value)
