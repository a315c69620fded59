"""Fetches models from a hub as a user sees it: each row of the tables of model sources, with the
real client.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from lmi.sources.fetches import FAILURE, RESULT
from tests.machine import measurements, wait_until
from tests.sources.faulty_server import Answer
from tests.sources.fetching import (
    MIDWAY,
    QUICK,
    Fetch,
    contents,
    model_files,
    needs_mount,
    on_read_only,
    on_small_disk,
)
from tests.sources.hub_server import HubServer

ID = "writers/fox"
INDEX = (
    b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": '
    b'"model-00002-of-00002.safetensors"}}'
)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


class Reader:
    """A machine with a cache that fetches from one hub."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "huggingface" / "hub"
        self.storage = self.cache / "models--writers--fox"
        self.environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "huggingface")}
        self.fetches: list[Fetch] = []

    def fetch(self, *sources: str, arguments: tuple[str, ...] = QUICK, **options: object) -> Fetch:
        environ = self.environ | {str(k): str(options.pop(k)) for k in list(options) if k.isupper()}
        prefix = options.pop("prefix", ())
        folder = self.folder / f"fetch-{len(self.fetches)}"
        fetch = Fetch(
            folder,
            *sources or (ID,),
            environ=environ,
            arguments=arguments,
            prefix=tuple(prefix),
            **options,
        )  # type: ignore[arg-type]
        self.fetches.append(fetch)
        return fetch


@pytest.fixture
def reader(hub: HubServer, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(hub, tmp_path)
    yield reader
    for fetch in reader.fetches:
        fetch.kill()


def test_a_hub_id_becomes_a_folder_with_the_files_that_a_server_needs(
    hub: HubServer, reader: Reader
) -> None:
    further_files = {
        "README.md": b"x",
        "model.gguf": b"x",
        "pytorch_model.bin": b"x",
        "original/params.json": b"x",
    }
    code = {"modeling_fox.py": b"x", "consolidated.safetensors": b"x"}
    commit = hub.publish(ID, model_files() | further_files | code)
    fetch = reader.fetch()
    [folder] = fetch.folders()

    assert contents(folder) == model_files()
    assert folder == reader.storage / "snapshots" / commit
    assert f"{ID}: revision main is commit {commit}" in fetch.lines()


def test_trust_remote_code_brings_the_code_of_the_model(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files() | {"modeling_fox.py": b"x"})
    [folder] = reader.fetch(trust_remote_code=True).folders()
    assert (folder / "modeling_fox.py").is_file()


def test_options_in_a_remote_source_are_not_read_with_a_warning(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files() | {"serving.properties": b"option.max_rolling_batch_size=1"})
    fetch = reader.fetch()
    assert contents(fetch.folders()[0]) == model_files()
    assert any("its serving.properties is not read" in line for line in fetch.lines())


def test_a_second_start_fetches_nothing_again(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    assert reader.fetch().folders() == reader.fetch().folders()
    assert hub.num_requests("GET .*/resolve/") == len(model_files())
    assert hub.num_requests("GET .*/revision/") == 2


def test_a_revision_can_be_named_and_a_cached_commit_asks_nobody(
    hub: HubServer, reader: Reader
) -> None:
    commit = hub.publish(ID, model_files(10), revision="v1")
    hub.publish(ID, model_files(20))
    [folder] = reader.fetch(revision="v1").folders()
    assert len((folder / "model.safetensors").read_bytes()) == 10
    num_requests = len(hub.requests)
    assert reader.fetch(revision=commit).folders() == [folder]
    assert len(hub.requests) == num_requests


def test_a_new_commit_fetches_only_what_changed(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    reader.fetch().folders()
    hub.publish(ID, model_files() | {"tokenizer.json": b'{"new": 1}'})
    [folder] = reader.fetch().folders()
    assert (folder / "tokenizer.json").read_bytes() == b'{"new": 1}'
    assert hub.num_requests("GET .*/model.safetensors") == 1


def test_progress_is_written_while_bytes_arrive(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(8 << 20))
    rule = hub.hold("GET .*/model.safetensors", after=2 << 20)
    fetch = reader.fetch()
    wait_until(lambda: fetch.progress().num_files == 2, "two of three files are there")
    report = fetch.progress()

    assert (report.stage, report.source, report.total_files) == ("download", ID, 3)
    assert report.total_bytes == sum(map(len, model_files(8 << 20).values()))
    assert 0 < report.share < 1

    rule.released.set()
    fetch.folders()

    assert fetch.progress().num_bytes == fetch.progress().total_bytes
    assert fetch.progress().num_files == 3


def test_the_log_says_how_far_it_is(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1 << 20))
    rule = hub.hold("GET .*/model.safetensors", after=1 << 19)
    fetch = reader.fetch(arguments=(*QUICK, "--log-s", "0.1"))
    wait_until(lambda: any("2 of 3 files" in line for line in fetch.lines()), "the log says it")
    [line, *_] = [line for line in fetch.lines() if "2 of 3 files" in line]
    assert re.fullmatch(
        rf"download of {ID}: \d+%, [\d.]+ \w+ of 1.0 MB, [\d.]+ \w+/s, 2 of 3 files", line
    )
    rule.released.set()
    fetch.folders()


def test_a_download_that_hangs_is_a_warning(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1 << 20))
    rule = hub.hold("GET .*/model.safetensors", after=1 << 10)
    fetch = reader.fetch(arguments=(*QUICK, "--log-s", "0.1"))
    progress_line = re.compile(
        rf"download of {ID}( is slow: |: no byte came lately, ).* (that )?are missing"
    )
    wait_until(
        lambda: any(progress_line.fullmatch(line) for line in fetch.lines()),
        "the log says that it is slow",
    )
    rule.released.set()
    fetch.folders()


def test_a_hub_that_does_not_answer_is_told_as_waited_for(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    rule = hub.hold("GET .*/revision/", after=0)
    fetch = reader.fetch(arguments=(*QUICK, "--log-s", "0.1"))
    assert rule.reached.wait(60)

    wait_until(
        lambda: f"download of {ID}: waits for the list of its files" in fetch.lines(),
        "the log says it",
    )
    rule.released.set()
    fetch.folders()

    assert not any("0 B of 0 B" in line for line in fetch.lines())


def test_a_download_that_breaks_is_one_line(hub: HubServer, reader: Reader) -> None:
    commit = hub.publish(ID, model_files(1 << 20))
    hub.cut("GET .*/model.safetensors", after=1 << 19)
    fetch = reader.fetch()
    fetch.folders()
    first, broken, last = fetch.lines()
    assert first == f"{ID}: revision main is commit {commit}" and f"{ID} is in " in last
    assert broken.startswith(f"{ID}: model.safetensors: {hub.url}: RemoteProtocolError: ")


def test_a_terminal_gets_a_bar_and_no_lines(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1 << 20))
    rule = hub.hold("GET .*/model.safetensors", after=1 << 19)
    master, slave = pty.openpty()
    fetch = reader.fetch(output=slave, log_format="text", arguments=(*QUICK, "--log-s", "0.1"))
    os.close(slave)
    progress_shown = b""
    with closing(open(master, "rb", buffering=0)) as terminal:
        while b"2/3" not in progress_shown:
            progress_shown += terminal.read(4096)

        rule.released.set()
        fetch.folders()
        progress_shown += terminal.read(65536)

    assert f"download {ID}".encode() in progress_shown and b"MB" in progress_shown
    assert b"files" not in progress_shown
    assert re.search(rb"\r\x1b\[2K20\S+ \S*INFO\S* [^\n]* is commit ", progress_shown), (
        "a line of the log clears the bar first"
    )


def test_a_terminal_gets_lines_from_a_fetch_that_has_no_bar(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    master, slave = pty.openpty()
    with closing(open(master, "rb", buffering=0)) as terminal:
        fetch = reader.fetch(output=slave, log_format="text", arguments=(*QUICK, "--no-bar"))
        os.close(slave)
        fetch.folders()
        progress_shown = b""
        # The other end is closed
        with suppress(OSError):
            while part := terminal.read(65536):
                progress_shown += part

    assert b"is in " in progress_shown and b"\x1b[?25l" not in progress_shown


def wait_for_two_files(fetch: Fetch) -> None:
    wait_until(lambda: fetch.progress().num_files == 2, "two of three files are there")


def test_sigterm_ends_it_at_once_and_whole_files_stay(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1 << 20))
    for measurement in measurements():
        rule = hub.hold("GET .*/model.safetensors", after=1 << 18)
        fetch = reader.fetch()
        wait_for_two_files(fetch)
        with measurement.within(2.0):
            fetch.process.send_signal(signal.SIGTERM)
            assert fetch.wait() == -signal.SIGTERM

        rule.released.set()

    assert len(reader.fetch().folders()) == 1
    assert hub.num_requests("GET .*/config.json") == 1


def test_what_a_killed_process_left_is_not_taken_for_whole(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1 << 20))
    hub.hold("GET .*/model.safetensors", after=1 << 18)
    fetch = reader.fetch()
    wait_until(lambda: fetch.progress().num_files == 2, "two of three files are there")
    fetch.kill()
    assert reader.fetch(HF_HUB_OFFLINE=1).failure().exit_code == 4
    [folder] = reader.fetch().folders()
    assert contents(folder) == model_files(1 << 20)
    assert part_bytes(reader) == []


def test_a_connection_that_breaks_is_resumed_by_bytes(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(3 << 20))
    hub.cut("GET .*/model.safetensors", after=2 << 20)
    [folder] = reader.fetch().folders()
    assert contents(folder) == model_files(3 << 20)
    assert [head["range"] for path, head in hub.headers.items() if "range" in head] == [
        f"bytes={2 << 20}-"
    ]


def test_a_file_that_a_killed_process_left_is_resumed_by_bytes(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files(3 << 20))
    hub.hold("GET .*/model.safetensors", after=2 << 20)
    fetch = reader.fetch()
    wait_until(lambda: part_bytes(reader) == [2 << 20], "two of three MiB are there")
    fetch.kill()
    again = reader.fetch()
    [folder] = again.folders()

    assert contents(folder) == model_files(3 << 20)
    assert [head["range"] for head in hub.headers.values() if "range" in head] == [
        f"bytes={2 << 20}-"
    ]
    assert again.progress().num_bytes == again.progress().total_bytes == 3 << 20
    assert part_bytes(reader) == []


def part_bytes(reader: Reader) -> list[int]:
    """The bytes of each file that is there in part. One may become whole meanwhile."""
    sizes = []
    for path in reader.storage.rglob("*.incomplete"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)

    return sizes


def test_a_hub_that_sends_no_parts_of_files_is_asked_for_the_whole_one(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files(3 << 20))
    hub.has_ranges = False
    hub.hold("GET .*/model.safetensors", after=2 << 20)
    fetch = reader.fetch()
    wait_until(lambda: part_bytes(reader) == [2 << 20], "two of three MiB are there")
    fetch.kill()
    [folder] = reader.fetch().folders()
    assert contents(folder) == model_files(3 << 20)


def test_what_a_killed_process_left_wrong_is_fetched_anew(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(3 << 20))
    hub.replace(
        "GET .*/model.safetensors", Answer(200, {"Content-Length": str(3 << 20)}, bytes(2 << 20))
    )
    fetch = reader.fetch()
    wait_until(lambda: part_bytes(reader) == [2 << 20], "two of three MiB are there")
    fetch.kill()
    again = reader.fetch()
    [folder] = again.folders()

    assert contents(folder) == model_files(3 << 20)
    assert any(
        "wanted SHA-256" in line and "it is fetched once more" in line for line in again.lines()
    )


def test_a_corrupt_file_is_fetched_once_more_then_exit_4(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    corrupt = Answer(200, {}, model_files()["model.safetensors"][:-1] + b"\0")
    hub.replace("GET .*/model.safetensors", corrupt)
    [folder] = reader.fetch().folders()
    assert contents(folder) == model_files()

    hub.publish(ID, model_files(2000))
    hub.replace("GET .*/model.safetensors", Answer(200, {}, bytes(2000)), times=2)
    failure = reader.fetch().failure()

    assert (failure.exit_code, failure.label) == (4, "model_unusable")
    assert re.fullmatch(
        rf"{ID}: model.safetensors: wanted SHA-256 \w+, found \w+, twice", failure.message
    )
    assert [
        path.stat().st_size
        for path in (reader.storage / "blobs").iterdir()
        if path.stat().st_size > 100
    ] == [1000]


def test_a_hub_that_often_fails_is_asked_again_as_long_as_bytes_arrive(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files(3 << 20))
    hub.cut("GET .*/model.safetensors", after=300_000, times=9)
    [folder] = reader.fetch(arguments=("--delays", "0.05", "--spare-bytes", "0")).folders()
    assert contents(folder) == model_files(3 << 20)
    assert hub.num_requests("GET .*/model.safetensors") == 10


def test_a_hub_that_fails_each_fifth_request_is_fetched_whole(
    hub: HubServer, reader: Reader
) -> None:
    """A last file takes three requests a try: if each third failed, it might always be that of the
    file.
    """
    files = model_files() | {
        f"model-{number}.safetensors": bytes([number]) * 1000 for number in range(20)
    }
    hub.publish(ID, files)
    hub.fails_each = 5
    [folder] = reader.fetch().folders()
    assert contents(folder) == files


def test_a_token_does_not_follow_a_file_to_another_host(hub: HubServer, reader: Reader) -> None:
    hub.token = "hf_right"
    hub.publish(ID, model_files())
    with HubServer() as second_hub:
        second_hub.publish(ID, model_files())
        hub.files_at = second_hub.url
        [folder] = reader.fetch(
            HF_TOKEN="hf_right", opened_hosts=(second_hub.url.removeprefix("http://"),)
        ).folders()

        assert contents(folder) == model_files()
        assert [request.rpartition("/")[2] for request in second_hub.requests] == [
            "model.safetensors"
        ]
        assert all("authorization" not in head for head in second_hub.headers.values())


def test_a_hub_cannot_name_a_blob_outside_its_folder(hub: HubServer, reader: Reader) -> None:
    tree = [{"type": "file", "path": "config.json", "size": 2, "oid": "../../outside"}]
    hub.publish(ID, model_files())
    hub.replace(
        "GET .*/tree/", Answer(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())
    )
    failure = reader.fetch().failure()
    assert (
        failure.exit_code == 4
        and "does not answer as a hub: it lists 'config.json' with the id" in failure.message
    )


def test_a_hub_that_falls_silent_is_asked_for_the_rest(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(3 << 20))
    hub.hold("GET .*/model.safetensors", after=2 << 20)
    [folder] = reader.fetch(HF_HUB_DOWNLOAD_TIMEOUT=1).folders()

    assert contents(folder) == model_files(3 << 20)
    assert hub.num_requests("GET .*/model.safetensors") == 2

    [range] = [
        head["range"]
        for path, head in hub.headers.items()
        if path.startswith("GET") and "range" in head
    ]

    assert range.startswith("bytes=") and range != "bytes=0-"


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    hub.fail("GET .*/revision/", 503, times=3)
    hub.fail("GET .*/revision/", 429)
    fetch = reader.fetch()
    fetch.folders()
    assert sum("the next try is in" in line for line in fetch.lines()) == 4


def test_a_hub_that_cannot_be_reached_five_times_is_exit_6(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    hub.fail("GET .*/revision/", 502, times=5)
    failure = reader.fetch().failure()
    assert (failure.exit_code, failure.label) == (6, "source_unreachable")
    assert failure.message.startswith(f"{ID}: {reader.environ['HF_ENDPOINT']} answers 502")
    assert hub.num_requests("GET .*/revision/") == 5


@pytest.mark.parametrize(
    ("is_adapter", "start"),
    [
        (False, "no folder models/qwen3 here;"),
        (True, "models/qwen3: no such folder below the model's;"),
    ],
)
def test_a_hub_that_no_connection_reaches_is_exit_6_after_one_try_and_the_folder_is_named_first(
    reader: Reader, is_adapter: bool, start: str
) -> None:
    fetch = reader.fetch("models/qwen3", HF_ENDPOINT="http://127.0.0.1:9", is_adapter=is_adapter)
    failure = fetch.failure()
    assert failure.exit_code == 6
    message = f"{start} as an id of a hub it cannot be reached: http://127.0.0.1:9: ConnectError"
    assert failure.message.startswith(message)
    assert not any("the next try is in" in line for line in fetch.lines())


def test_the_cached_snapshot_is_used_with_a_warning_if_the_hub_is_unreachable(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files())
    folders = reader.fetch().folders()
    fetch = reader.fetch(HF_ENDPOINT="http://127.0.0.1:9")
    assert fetch.folders() == folders
    assert any("cannot be reached" in line and "cache" in line for line in fetch.lines())
    hub.publish(ID, model_files(20))
    hub.fail("GET .*/model.safetensors", 520)
    assert reader.fetch(arguments=("--delays",)).folders() == folders, (
        "the older commit, which is whole"
    )


def test_a_cached_snapshot_is_served_offline_and_nobody_is_asked(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files())
    folders = reader.fetch().folders()
    num_requests = len(hub.requests)
    assert reader.fetch(HF_HUB_OFFLINE=1).folders() == folders
    assert len(hub.requests) == num_requests
    (folders[0] / "tokenizer.json").unlink()
    failure = reader.fetch(HF_HUB_OFFLINE=1).failure()
    assert f"{folders[0]} has no tokenizer.json" in failure.message


def test_offline_without_a_snapshot_names_the_variable_and_the_cache(reader: Reader) -> None:
    failure = reader.fetch(HF_HUB_OFFLINE=1).failure()
    assert failure.exit_code == 4
    assert failure.message.startswith(f"no folder {ID} here; ")
    assert (
        "HF_HUB_OFFLINE=1" in failure.message
        and f"is not in the cache {reader.cache}" in failure.message
    )
    assert "TRANSFORMERS_OFFLINE=1" in reader.fetch(TRANSFORMERS_OFFLINE=1).failure().message


def test_a_model_that_is_not_there_or_private_names_the_state_of_the_token(
    hub: HubServer, reader: Reader
) -> None:
    failure = reader.fetch().failure()
    assert failure.exit_code == 4
    assert (
        ID in failure.message
        and "404" in failure.message
        and "HF_TOKEN is not set" in failure.message
    )

    hub.publish(ID, model_files())
    hub.token = "hf_right"
    failure = reader.fetch(HF_TOKEN="hf_wrong").failure()

    assert "401" in failure.message and failure.message.endswith("HF_TOKEN is set")
    assert "hf_wrong" not in failure.message
    assert len(reader.fetch(HF_TOKEN="hf_right").folders()) == 1


def test_a_gated_model_says_that_its_licence_must_be_accepted(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files())
    hub.gated.add(ID)
    failure = reader.fetch(HF_TOKEN="hf_right").failure()
    assert failure.exit_code == 4
    assert (
        "gated" in failure.message
        and f"{hub.url}/{ID}" in failure.message
        and "licence" in failure.message
    )


def test_a_revision_that_is_not_there_is_named(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    failure = reader.fetch(revision="v2").failure()
    assert failure.exit_code == 4
    assert ID in failure.message and "v2" in failure.message


def test_only_pickled_weights_are_refused_before_a_byte_is_fetched(
    hub: HubServer, reader: Reader
) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.publish(ID, files)
    failure = reader.fetch().failure()
    assert (failure.exit_code, failure.label) == (5, "security_refused")
    assert "pytorch_model.bin" in failure.message and "option.allow_pickle" in failure.message
    assert hub.num_requests("/resolve/") == 0
    [folder] = reader.fetch(allow_pickle=True).folders()
    assert contents(folder) == files


def test_a_repository_without_config_or_with_a_shard_missing_says_what_is_missing(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, {"model.safetensors": b"x", "README.md": b"x"})
    failure = reader.fetch().failure()

    assert (
        failure.exit_code == 4
        and "has config.json" in failure.message
        and "README.md" in failure.message
    )

    shard = "model-00001-of-00002.safetensors"
    hub.publish(ID, {"config.json": b"{}", "model.safetensors.index.json": INDEX, shard: b"x"})
    failure = reader.fetch().failure()

    assert failure.exit_code == 4 and "has no model-00002-of-00002.safetensors" in failure.message


def test_a_file_of_the_wrong_size_is_fetched_once_more(hub: HubServer, reader: Reader) -> None:
    commit = hub.publish(ID, model_files())
    head = {"ETag": '"e"', "X-Repo-Commit": commit, "Content-Length": "1000"}
    hub.replace("HEAD .*/model.safetensors", Answer(200, head))
    hub.replace("GET .*/model.safetensors", Answer(200, {"ETag": '"e"'}, b"short"))
    [folder] = reader.fetch().folders()
    assert contents(folder) == model_files()


def test_a_file_of_the_wrong_size_twice_is_exit_4(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1000))
    hub.listed_sizes["model.safetensors"] = 1001
    failure = reader.fetch().failure()

    assert failure.exit_code == 4
    assert (
        "model.safetensors" in failure.message
        and "1001" in failure.message
        and "1000" in failure.message
    )
    assert hub.num_requests("GET .*/model.safetensors") == 2
    assert reader.fetch(HF_HUB_OFFLINE=1).failure().exit_code == 4


def test_a_second_process_waits_and_fetches_nothing(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files(1 << 20))
    rule = hub.hold("GET .*/model.safetensors", after=1 << 18)
    first = reader.fetch()
    assert rule.reached.wait(60)

    second = reader.fetch()
    wait_until(
        lambda: any("this one waits" in line for line in second.lines()), "the second one waits"
    )
    rule.released.set()

    assert first.folders() == second.folders()
    assert hub.num_requests("GET .*/model.safetensors") == 1


def test_a_disk_without_room_is_named_before_a_byte_is_fetched(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files())
    failure = reader.fetch(arguments=("--spare-bytes", str(1 << 60))).failure()
    assert failure.exit_code == 4
    for part in (ID, str(reader.cache), "are needed", "are free", "HF_HOME"):
        assert part in failure.message

    assert hub.num_requests("/resolve/") == 0


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    (reader.folder / "file").touch()
    failure = reader.fetch(HF_HUB_CACHE=reader.folder / "file" / "hub").failure()
    assert failure.exit_code == 4
    assert str(reader.folder / "file") in failure.message and "HF_HUB_CACHE" in failure.message


@needs_mount
def test_a_disk_that_gets_full_midway_is_named_and_keeps_no_part(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files(3 << 20))
    home = reader.folder / "huggingface"
    failure = reader.fetch(arguments=MIDWAY, prefix=on_small_disk(home, 2 << 20)).failure()
    assert (failure.exit_code, failure.label) == (4, "model_unusable")
    for part in (ID, str(reader.cache), "are needed", "are free", "HF_HOME"):
        assert part in failure.message

    assert ".incomplete" not in (reader.folder / "left").read_text()


@needs_mount
def test_a_whole_snapshot_in_a_cache_that_cannot_be_written_is_served(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files())
    folders = reader.fetch().folders()
    read_only = on_read_only(reader.folder / "huggingface")
    assert reader.fetch(prefix=read_only).folders() == folders
    assert reader.fetch(prefix=read_only, HF_HUB_OFFLINE=1).folders() == folders
    hub.publish(ID, model_files(20))
    failure = reader.fetch(prefix=read_only).failure()
    assert failure.exit_code == 4
    assert "Read-only file system" in failure.message and "HF_HOME" in failure.message


def test_an_answer_that_is_no_hub_says_so(hub: HubServer, reader: Reader) -> None:
    hub.replace(
        "GET .*/revision/", Answer(200, {"Content-Type": "text/html"}, b"<html>sign in</html>")
    )
    failure = reader.fetch().failure()
    assert failure.exit_code == 4 and "does not answer as a hub" in failure.message


@pytest.mark.parametrize("path", ["../../../outside.json", "/outside.json", "a//b.json"])
def test_a_hub_cannot_list_a_way_out_of_its_folder(
    hub: HubServer, reader: Reader, path: str
) -> None:
    outside = reader.folder / "huggingface" / "outside.json"
    outside.parent.mkdir()
    outside.write_text("not its file")
    hub.publish(ID, model_files() | {path: b"x"})
    failure = reader.fetch().failure()
    assert failure.exit_code == 5 and f"{path} is not a path inside it" in failure.message
    assert outside.read_text() == "not its file"
    assert hub.num_requests("/resolve/") == 0


def test_a_hub_cannot_name_a_commit_that_is_none(hub: HubServer, reader: Reader) -> None:
    answer = Answer(
        200, {"Content-Type": "application/json"}, b'{"id": "writers/fox", "sha": "../../x"}'
    )
    hub.replace("GET .*/revision/", answer)
    failure = reader.fetch().failure()
    assert (
        failure.exit_code == 4
        and "does not answer as a hub: it names the commit" in failure.message
    )


def test_several_sources_are_fetched_by_one_process_and_one_fault_ends_it(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(ID, model_files())
    hub.publish("writers/hare", model_files(10))
    folders = reader.fetch(ID, "writers/hare").folders()
    assert [len((folder / "model.safetensors").read_bytes()) for folder in folders] == [1000, 10]
    fetch = reader.fetch(ID, "writers/wolf")
    assert "writers/wolf" in fetch.failure().message
    assert not (fetch.folder / RESULT).exists()
    assert (fetch.folder / FAILURE).exists()


def test_no_secret_stands_in_log_or_files(hub: HubServer, reader: Reader) -> None:
    hub.publish(ID, model_files())
    hub.token = "hf_secret"
    fetch = reader.fetch(HF_TOKEN="hf_secret")
    fetch.folders()
    files_written = [path.read_bytes() for path in fetch.folder.iterdir() if path.is_file()]
    assert all(b"hf_secret" not in data for data in files_written)


def test_a_scheme_that_is_not_known_names_those_there_are(reader: Reader) -> None:
    failure = reader.fetch("gs://bucket/model").failure()
    assert failure.exit_code == 4
    assert (
        "gs://" in failure.message
        and "s3://bucket/prefix" in failure.message
        and "owner/name" in failure.message
    )


def test_an_adapter_of_a_hub_is_whole_without_a_model_config(
    hub: HubServer, reader: Reader
) -> None:
    hub.publish(
        ID, {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "README.md": b""}
    )
    [folder] = reader.fetch(is_adapter=True).folders()
    assert sorted(contents(folder)) == ["adapter_config.json", "adapter_model.safetensors"]
    assert reader.fetch().failure().exit_code == 4
