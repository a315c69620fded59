"""Async invocations that are kept on a disk: a gateway that was killed or stopped loses none, and
the next one leaves exactly one answer for each.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.gateway.gateways import Gateway, gateway, scripted, then_silent, whole
from tests.gateway.small_disk import enlarge, on_small_disk, seen_by
from tests.sources.fetching import needs_mount
from tests.system.container import wait_until

TEXT = b'{"generated_text": "hello"}'
ANSWER = whole(TEXT, 200, "Content-Type: application/json")
SILENT = then_silent(lambda talk: None)
SMALL_DISK_BYTES = 64 << 10
# Longer than that, and no longer than a body may be.
LONG_BYTES = 100_000


def accept(
    aws: Gateway, body: bytes = b"{}", endpoint: str = "any", **parameters: Any
) -> dict[str, Any]:
    accepted: dict[str, Any] = aws.runtime.invoke_endpoint_async(
        EndpointName=endpoint, Body=body, **parameters
    )
    return accepted


def kill(aws: Gateway) -> None:
    os.kill(aws.process.pid, signal.SIGKILL)
    aws.process.wait(60)


def files_of(accepted: dict[str, Any]) -> list[Path]:
    """Return which of its two files an invocation has left."""
    locations = (accepted["OutputLocation"], accepted["FailureLocation"])
    files = [Path(location.removeprefix("file://")) for location in locations]
    return [file for file in files if file.exists()]


def wait_until_answered(accepted: list[dict[str, Any]]) -> None:
    wait_until(lambda: all(map(files_of, accepted)), "each invocation has left a file")


def names_kept(folder: Path) -> list[str]:
    return [file.name for file in (folder / "queue").iterdir() if file.name != "lock"]


def folders(folder: Path) -> list[str]:
    return ["--async-queue", str(folder / "queue"), "--async-output", str(folder / "out")]


def flags(folder: Path, url: str) -> list[str]:
    return ["--endpoint", url, *folders(folder)]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_what_runs_and_waits_when_a_gateway_ends_is_answered_by_the_next_one(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with scripted(SILENT) as container:
        command = [*flags(tmp_path, container.url), "--async-concurrency", "2"]
        with gateway(*command) as aws:
            accepted = [accept(aws, InferenceId=f"{number}") for number in range(5)]
            wait_until(lambda: len(container.seen) == 2, "two of them run")
            aws.process.send_signal(signum)
            aws.process.wait(60)

        assert not any(map(files_of, accepted))
        assert len(names_kept(tmp_path)) == 5

        container.script = ANSWER
        with gateway(*command):
            wait_until_answered(accepted)
            wait_until(lambda: not names_kept(tmp_path), "nothing is kept any more")

    for acceptance in accepted:
        [file] = files_of(acceptance)
        assert file.read_bytes() == TEXT

    ids = [str(seen.header("X-Amzn-SageMaker-Inference-Id")) for seen in container.seen]
    assert sorted(ids[2:]) == ["0", "1", "2", "3", "4"]


def test_no_accepted_invocation_is_lost_whenever_the_gateway_is_killed(tmp_path: Path) -> None:
    accepted = []
    with scripted(ANSWER) as container:
        command = flags(tmp_path, container.url)
        for num_accepted in (1, 20):
            with gateway(*command) as aws:
                while len(accepted) < num_accepted:
                    accepted.append(accept(aws))

                kill(aws)

        with gateway(*command):
            wait_until_answered(accepted)
            wait_until(lambda: not names_kept(tmp_path), "nothing is kept any more")

    for acceptance in accepted:
        [file] = files_of(acceptance)
        assert file.read_bytes() == TEXT

    assert len(list((tmp_path / "out").iterdir())) == len(accepted)


def test_an_invocation_whose_endpoint_is_not_back_waits_for_it(tmp_path: Path) -> None:
    with scripted(SILENT) as container:
        port = container.server_address[1]
        command = flags(tmp_path, container.url)
        with gateway(*command) as aws:
            accepted = accept(aws)
            wait_until(lambda: container.seen, "it runs")
            kill(aws)

    with gateway(*command) as aws:
        wait_until(lambda: aws.says("1 async invocations"), "the next gateway has it")
        with scripted(ANSWER, port=port):
            wait_until_answered([accepted])

    [file] = files_of(accepted)
    assert file.read_bytes() == TEXT


# A disk without room.


@needs_mount
def test_what_a_full_disk_cannot_keep_is_refused_and_nothing_else(tmp_path: Path) -> None:
    prefix = on_small_disk(tmp_path / "queue", SMALL_DISK_BYTES)
    with scripted(ANSWER) as container:
        with gateway(*flags(tmp_path, container.url), prefix=prefix) as aws:
            with pytest.raises(ClientError) as caught:
                accept(aws, b"x" * LONG_BYTES)

            wait_until_answered([accept(aws)])

    answer = caught.value.response
    assert answer["Error"]["Code"] == "ServiceUnavailable"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert "cannot be kept: No space left on device." in answer["Error"]["Message"]
    assert len(container.seen) == 1


@needs_mount
def test_an_answer_waits_until_a_full_disk_has_room(tmp_path: Path) -> None:
    """It keeps nobody from the container, though one invocation runs at a time."""
    out = tmp_path / "out"
    prefix = on_small_disk(out, SMALL_DISK_BYTES)
    one_at_a_time = ["--async-concurrency", "1"]
    with scripted(whole(b"x" * LONG_BYTES)) as wordy, scripted(ANSWER) as container:
        endpoints = ["--endpoint", f"wordy={wordy.url}", "--endpoint", f"any={container.url}"]
        with gateway(*endpoints, *folders(tmp_path), *one_at_a_time, prefix=prefix) as aws:
            patient = accept(aws, endpoint="wordy", InferenceId="patient")
            wait_until(lambda: aws.says("async invocation patient waits"), "it waits for room")

            quick = Path(accept(aws)["OutputLocation"]).name
            wait_until(lambda: names(aws, out) == [quick], "the next one is answered meanwhile")

            enlarge(aws, out, 8 * SMALL_DISK_BYTES)
            wait_until(lambda: not names_kept(tmp_path), "it is written")
            assert sorted(names(aws, out)) == sorted([quick, Path(patient["OutputLocation"]).name])


def names(aws: Gateway, folder: Path) -> list[str]:
    """The files in a folder, as the gateway sees it."""
    return [path.name for path in seen_by(aws, folder).iterdir()]


def test_what_has_no_place_for_its_answer_stays_for_the_next_gateway(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.write_text("no folder")
    with scripted(ANSWER) as container:
        with gateway(*flags(tmp_path, container.url)) as aws:
            accepted = accept(aws, InferenceId="mine")
            wait_until(lambda: aws.says("invocation mine has no file"), "it cannot be written")

        place.unlink()
        with gateway(*flags(tmp_path, container.url)):
            wait_until_answered([accepted])

    [file] = files_of(accepted)
    assert "cannot be written" in file.read_text()


def test_one_gateway_at_a_time_has_a_queue(tmp_path: Path) -> None:
    with scripted(ANSWER) as container, gateway(*flags(tmp_path, container.url)):
        with pytest.raises(AssertionError, match="belongs to another gateway"):
            with gateway(*flags(tmp_path, container.url)):
                pass


def test_what_cannot_be_read_is_passed_over_and_stays(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "1.job").write_bytes(b"\xc1")
    with scripted(ANSWER) as container, gateway(*flags(tmp_path, container.url)) as aws:
        wait_until_answered([accept(aws)])
        assert aws.says("1.job is passed over")

    assert names_kept(tmp_path) == ["1.job"]
