"""A GGUF model of a hub's repository: only its files come, and a folder is made of them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from lmi.errors import ModelUnusable
from lmi.sources.fetch import fetch
from lmi.sources.fetches import WantedSource
from lmi.sources.job import FetchJob
from lmi.text.tokenizer import Tokenizer
from tests.gguf_files import EMBEDDING, SMALL_FILE, SMALL_MODEL, SMALL_PARTS, gguf_bytes
from tests.sources.fetching import model_files
from tests.sources.hub_server import HubServer

ID = "writers/fox"
LONGER = gguf_bytes(SMALL_MODEL | {"llama.context_length": 128}, EMBEDDING)
PARTS = {f"BF16/{name.replace('small', 'fox-BF16')}": data for name, data in SMALL_PARTS.items()}
FILES = {
    "README.md": b"x",
    "fox.Q4_K_M.gguf": SMALL_FILE,
    "fox.Q8_0.gguf": LONGER,
    "mmproj-fox.gguf": b"x",
    **PARTS,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def fetched(source: str, tmp_path: Path, **options: Any) -> Path:
    wanted_source = WantedSource(source=source, download_dir=str(tmp_path / "models"), **options)
    return fetch(FetchJob(wanted_source, delays_s=(), spare_bytes=0))


def fetched_paths(hub: HubServer) -> list[str]:
    paths = []
    for request in hub.requests:
        if "/resolve/" in request:
            paths.append(request.partition("/resolve/")[2].partition("/")[2])

    return sorted(paths)


def context_length(folder: Path) -> int:
    length: int = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return length


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (ID, "fox.Q4_K_M.gguf"),
        (f"{ID}:Q8_0", "fox.Q8_0.gguf"),
        (f"{ID}:fox.Q8_0.gguf", "fox.Q8_0.gguf"),
        (f"{ID}/fox.Q8_0.gguf", "fox.Q8_0.gguf"),
    ],
)
def test_only_the_file_of_the_model_is_fetched_and_opened(
    source: str, path: str, hub: HubServer, tmp_path: Path
) -> None:
    commit = hub.publish(ID, FILES)
    folder = fetched(source, tmp_path)
    file = tmp_path / "hub" / "models--writers--fox" / "snapshots" / commit / path

    assert fetched_paths(hub) == [path]
    assert (folder / path).readlink() == file
    assert (folder / path).read_bytes() == FILES[path]
    assert context_length(folder) == (128 if "Q8_0" in path else 64)
    assert Tokenizer.load(folder).encode("ab")


def test_all_files_of_a_split_model_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    hub.publish(ID, FILES)
    folder = fetched(f"{ID}:BF16", tmp_path)
    assert fetched_paths(hub) == sorted(PARTS)
    assert sorted(file.name for file in folder.glob("*.gguf")) == [
        "fox-BF16-00001-of-00002.gguf",
        "fox-BF16-00002-of-00002.gguf",
    ]


def test_a_second_start_fetches_nothing_and_opens_nothing_again(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.publish(ID, FILES)
    folder = fetched(ID, tmp_path)
    made_ns = folder.stat().st_mtime_ns
    assert fetched(ID, tmp_path) == folder
    assert folder.stat().st_mtime_ns == made_ns
    assert fetched_paths(hub) == ["fox.Q4_K_M.gguf"]


def test_another_model_of_the_repository_comes_beside_the_first(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.publish(ID, FILES)
    first = fetched(ID, tmp_path)
    second = fetched(f"{ID}:Q8_0", tmp_path)
    assert (context_length(first), context_length(second)) == (64, 128)
    assert fetched(ID, tmp_path) == first
    assert fetched_paths(hub) == ["fox.Q4_K_M.gguf", "fox.Q8_0.gguf"]


def test_a_new_commit_is_opened_anew(hub: HubServer, tmp_path: Path) -> None:
    hub.publish(ID, FILES)
    fetched(ID, tmp_path)
    hub.publish(ID, FILES | {"fox.Q4_K_M.gguf": LONGER})
    assert context_length(fetched(ID, tmp_path)) == 128


@pytest.mark.parametrize("is_kept", [True, False], ids=["listing", "links alone"])
def test_what_was_fetched_starts_without_a_network(
    is_kept: bool, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish(ID, FILES)
    folder = fetched(f"{ID}:BF16", tmp_path)
    if not is_kept:
        shutil.rmtree(tmp_path / "hub" / "models--writers--fox" / "trees")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    num_requests = len(hub.requests)
    assert fetched(f"{ID}:BF16", tmp_path) == folder
    assert len(hub.requests) == num_requests

    lack = "has no fox.Q8_0.gguf" if is_kept else "there is no such GGUF file, only BF16/fox"
    with pytest.raises(ModelUnusable, match=f"^no file {ID}:Q8_0 here; .*{lack}.* forbids to ask"):
        fetched(f"{ID}:Q8_0", tmp_path)


def test_a_checkpoint_in_safetensors_beside_gguf_is_served_unless_gguf_is_named(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.publish(ID, FILES | model_files())
    assert (fetched(ID, tmp_path) / "model.safetensors").is_file()
    assert context_length(fetched(f"{ID}:Q8_0", tmp_path)) == 128


def test_a_file_that_is_no_gguf_is_one_line(hub: HubServer, tmp_path: Path) -> None:
    hub.publish(ID, {"fox.Q4_0.gguf": b"<html>" + bytes(100)})
    with pytest.raises(ModelUnusable, match="fox.Q4_0.gguf: is not a GGUF file"):
        fetched(ID, tmp_path)


def test_a_repository_that_is_not_there_is_named_as_a_file(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=f"^no file {ID}:Q4_0 here; as an id of a hub there is"):
        fetched(f"{ID}:Q4_0", tmp_path)


def test_an_adapter_is_no_gguf_file(hub: HubServer, tmp_path: Path) -> None:
    hub.publish(ID, FILES)
    with pytest.raises(ModelUnusable, match="an adapter is a folder as peft writes it"):
        fetched(f"{ID}:Q8_0", tmp_path, is_adapter=True)

    assert not hub.requests
