"""Fetches models from S3 as a user sees it: each row of the tables of model sources, with boto3
against moto.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lmi.supervisor.hints import hint
from tests.gguf_files import EMBEDDING, SMALL_FILE, SMALL_MODEL, SMALL_PARTS, gguf_bytes
from tests.machine import measurements, wait_until
from tests.sources.faulty_server import Answer
from tests.sources.fetching import (
    MIDWAY,
    QUICK,
    ROOT,
    Fetch,
    contents,
    model_files,
    needs_mount,
    on_small_disk,
)
from tests.sources.s3_server import S3Server, moto

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture
def s3(moto_port: int) -> Iterator[S3Server]:
    with S3Server(moto_port) as server:
        yield server


class Bucket:
    """A bucket, and a machine that fetches from it."""

    def __init__(self, s3: S3Server, folder: Path) -> None:
        self.s3 = s3
        self.name = f"models-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.downloads = folder / "downloads"
        self.fetches: list[Fetch] = []
        s3.client.create_bucket(Bucket=self.name)

    def put(self, prefix: str, files: Mapping[str, bytes]) -> str:
        """Upload files below a prefix. Returns the URL of the prefix."""
        self.s3.put(self.name, {f"{prefix}/{path}": data for path, data in files.items()})
        return f"s3://{self.name}/{prefix}"

    def put_archive(self, key: str, data: bytes) -> str:
        self.s3.put(self.name, {key: data})
        return f"s3://{self.name}/{key}"

    def fetch(self, *sources: str, arguments: tuple[str, ...] = QUICK, **given: Any) -> Fetch:
        """Start a fetch process. Names in capitals are variables of its environment, others fields
        of the request.
        """
        environ = self.s3.environ | {
            name: str(value) for name, value in given.items() if name.isupper()
        }
        options = {name: value for name, value in given.items() if not name.isupper()}
        options.setdefault("download_dir", str(self.downloads))
        folder = self.folder / f"fetch-{len(self.fetches)}"
        fetch = Fetch(folder, *sources, environ=environ, arguments=arguments, **options)
        self.fetches.append(fetch)
        return fetch


@pytest.fixture
def bucket(s3: S3Server, tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(s3, tmp_path)
    yield bucket
    for fetch in bucket.fetches:
        fetch.kill()


def archive(files: Mapping[str, bytes], mode: str = "w:gz", *more: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for member in more:
            tar.addfile(member)

    return buffer.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


# GGUF files.


def test_a_gguf_file_is_opened_and_a_second_start_reads_nothing_again(bucket: Bucket) -> None:
    url = bucket.put("team", {"fox.gguf": SMALL_FILE, "other.gguf": b"x"})
    [folder] = bucket.fetch(f"{url}/fox.gguf").folders()
    assert (folder / "fox.gguf").read_bytes() == SMALL_FILE
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"

    num_requests = len(bucket.s3.requests)
    assert bucket.fetch(f"{url}/fox.gguf").folders() == [folder]
    assert bucket.s3.requests[num_requests:] == [f"HEAD /{bucket.name}/team/fox.gguf"]


def test_a_gguf_file_that_changed_is_opened_anew(bucket: Bucket) -> None:
    url = bucket.put("team", {"fox.gguf": SMALL_FILE})
    bucket.fetch(f"{url}/fox.gguf").folders()
    longer = gguf_bytes(SMALL_MODEL | {"llama.context_length": 128}, EMBEDDING)
    bucket.put("team", {"fox.gguf": longer})
    [folder] = bucket.fetch(f"{url}/fox.gguf").folders()
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 128


@pytest.mark.parametrize("name", SMALL_PARTS)
def test_all_files_of_a_split_gguf_model_are_fetched(bucket: Bucket, name: str) -> None:
    url = bucket.put("team", SMALL_PARTS)
    [folder] = bucket.fetch(f"{url}/{name}").folders()
    assert sorted(file.name for file in folder.glob("*.gguf")) == sorted(SMALL_PARTS)


def test_a_split_gguf_model_without_a_part_is_named(bucket: Bucket) -> None:
    first, second = SMALL_PARTS
    url = bucket.put("team", {first: SMALL_PARTS[first]})
    failure = bucket.fetch(f"{url}/{first}").failure()
    assert failure.message == f"{url}/{first}: its part {second} is missing (NoSuchKey)"


def test_a_gguf_file_that_is_not_there_is_named(bucket: Bucket) -> None:
    url = bucket.put("team", {"Fox.gguf": SMALL_FILE})
    failure = bucket.fetch(f"{url}/fox.gguf").failure()
    assert failure.message == (
        f"{url}/fox.gguf: there is no such object (NoSuchKey); {url}/Fox.gguf differs in upper and "
        "lower case"
    )


def test_a_prefix_and_an_archive_with_a_gguf_file_alone_are_that_model(bucket: Bucket) -> None:
    url = bucket.put("team/fox", {"fox.gguf": SMALL_FILE, "README.md": b"x", "mmproj.gguf": b"x"})
    packed = bucket.put_archive("fox.tar.gz", archive({"fox/fox.gguf": SMALL_FILE}))
    for folder in bucket.fetch(url, packed).folders():
        assert (folder / "fox.gguf").read_bytes() == SMALL_FILE
        assert (folder / "tokenizer.json").is_file()


def test_an_engine_that_reads_no_gguf_gets_none(bucket: Bucket) -> None:
    url = bucket.put("team/fox", {"fox.gguf": SMALL_FILE})
    packed = bucket.put_archive("fox.tar.gz", archive({"fox.gguf": SMALL_FILE}))
    for source in (url, packed):
        failure = bucket.fetch(source, reads_gguf=False).failure()
        assert failure.message.startswith(f"{source}: its weights are GGUF, which the chosen")


# Prefixes.


def test_a_prefix_becomes_a_folder_with_the_files_that_a_server_needs(bucket: Bucket) -> None:
    further_files = {
        "README.md": b"x",
        "pytorch_model.bin": b"x",
        "model.gguf": b"x",
        "folder/": b"",
    }
    adapters = {
        "adapters/en/adapter_config.json": b"{}",
        "adapters/en/adapter_model.safetensors": b"x",
    }
    url = bucket.put("team/fox", model_files() | further_files | adapters)
    fetch = bucket.fetch(url + "/")
    [folder] = fetch.folders()
    assert contents(folder) == model_files() | adapters

    name = hashlib.sha256(f"{bucket.s3.url} {url}".encode()).hexdigest()
    assert folder == bucket.downloads / name / "model"


def test_a_prefix_is_not_that_of_its_namesake(bucket: Bucket) -> None:
    url = bucket.put("llama", model_files(10))
    bucket.put("llama2", model_files(20) | {"more.json": b"{}"})
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files(10)


def test_a_second_start_lists_once_and_fetches_only_what_changed(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    [folder] = bucket.fetch(url).folders()
    num_requests = len(bucket.s3.requests)

    assert bucket.fetch(url).folders() == [folder]
    assert [request.partition("?")[0] for request in bucket.s3.requests[num_requests:]] == [
        f"GET /{bucket.name}"
    ]

    bucket.put("fox", {"tokenizer.json": b'{"new": 1}', "chat_template.jinja": b"x"})
    bucket.s3.client.delete_object(Bucket=bucket.name, Key="fox/config.json")
    bucket.put("fox", {"config.json": b"{}"})
    num_requests = len(bucket.s3.requests)
    [folder] = bucket.fetch(url).folders()
    changed = {"tokenizer.json": b'{"new": 1}', "chat_template.jinja": b"x", "config.json": b"{}"}
    assert contents(folder) == model_files() | changed

    keys_read = {
        request.split("?")[0].rpartition("/")[2]
        for request in bucket.s3.requests[num_requests:]
        if "fox/" in request
    }

    assert keys_read - {""} == set(changed)


def test_an_object_that_is_gone_is_gone_from_the_folder(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files() | {"old.json": b"{}"})
    bucket.fetch(url).folders()
    bucket.s3.client.delete_object(Bucket=bucket.name, Key="fox/old.json")
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files()


def test_every_read_is_made_with_if_match(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files() | {"empty.txt": b""})
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files() | {"empty.txt": b""}

    reads = {
        path: head
        for path, head in bucket.s3.headers.items()
        if path.startswith("GET ") and "/fox/" in path
    }
    assert len(reads) == len(model_files())

    md5s = {hashlib.md5(data).hexdigest() for data in model_files().values()}
    assert {head["if-match"].strip('"') for head in reads.values()} == md5s


def test_an_object_that_really_changes_between_listing_and_read_is_read_in_its_new_form(
    bucket: Bucket,
) -> None:
    url = bucket.put("fox", model_files())
    rule = bucket.s3.hold(f"GET /{bucket.name}.list-type", after=0)
    fetch = bucket.fetch(url)
    assert rule.reached.wait(60)
    bucket.put("fox", {"tokenizer.json": b'{"new": 1}'})
    rule.released.set()
    [folder] = fetch.folders()
    assert contents(folder) == model_files() | {"tokenizer.json": b'{"new": 1}'}


def test_an_object_that_changes_twice_is_exit_4(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    bucket.s3.fail("GET .*/model.safetensors", 412, times=2)
    failure = bucket.fetch(url).failure()
    assert failure.exit_code == 4
    assert "fox/model.safetensors" in failure.message and "twice" in failure.message


def test_bytes_that_are_not_those_of_the_etag_are_fetched_once_more_then_exit_4(
    bucket: Bucket,
) -> None:
    url = bucket.put("fox", model_files())
    wrong = bytes(1000)
    head = {"Content-Range": "bytes 0-999/1000", "ETag": '"x"'}
    bucket.s3.replace("GET .*/model.safetensors", Answer(206, head, wrong))
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files()

    second_url = bucket.put("hare", model_files())
    bucket.s3.replace("GET .*/model.safetensors", Answer(206, head, wrong), times=2)
    failure = bucket.fetch(second_url).failure()
    assert failure.exit_code == 4

    md5 = [hashlib.md5(data).hexdigest() for data in (model_files()["model.safetensors"], wrong)]
    assert all(part in failure.message for part in ("hare/model.safetensors", *md5))


def test_an_object_of_the_wrong_size_twice_is_exit_4(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    head = {"Content-Range": "bytes 0-999/1000", "ETag": '"x"'}
    bucket.s3.replace("GET .*/model.safetensors", Answer(206, head, b"short"), times=2)
    failure = bucket.fetch(url).failure()
    assert failure.exit_code == 4
    assert all(part in failure.message for part in ("fox/model.safetensors", "1000 bytes", "5"))


def test_the_etag_of_an_object_in_parts_is_not_taken_for_its_md5(bucket: Bucket) -> None:
    url = bucket.put("fox", {"config.json": b"{}"})
    client = bucket.s3.client
    key = "fox/model.safetensors"
    upload = client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
    part = client.upload_part(
        Bucket=bucket.name, Key=key, UploadId=upload, PartNumber=1, Body=b"weights"
    )
    parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
    client.complete_multipart_upload(
        Bucket=bucket.name, Key=key, UploadId=upload, MultipartUpload=parts
    )
    [folder] = bucket.fetch(url).folders()

    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_the_etag_of_an_object_that_kms_encrypted_is_not_taken_for_its_md5(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    head = {"ETag": '"x"', "Content-Length": "1000", "x-amz-server-side-encryption": "aws:kms"}
    bucket.s3.replace("HEAD .*/model.safetensors", Answer(200, head))
    bucket.s3.replace(
        "GET .*/model.safetensors", Answer(206, {"Content-Range": "bytes 0-999/1000"}, bytes(1000))
    )
    [folder] = bucket.fetch(url).folders()
    assert (folder / "model.safetensors").read_bytes() == bytes(1000)


def test_progress_is_written_and_sigterm_ends_it_at_once(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files(4 << 20))
    for measurement in measurements():
        rule = bucket.s3.hold("GET .*/model.safetensors", after=1 << 20)
        fetch = bucket.fetch(url)
        shows_progress(fetch, url)
        with measurement.within(2.0):
            fetch.process.send_signal(signal.SIGTERM)
            assert fetch.wait() == -signal.SIGTERM

        rule.released.set()


def shows_progress(fetch: Fetch, url: str) -> None:
    wait_until(lambda: fetch.progress().num_files == 2, "two of three files are there")
    wait_until(lambda: fetch.progress().num_bytes > 1 << 19, "bytes are counted")
    wait_until(lambda: fetch.progress().source == url, "it is named")

    assert 0 < fetch.progress().share < 1


def test_a_killed_fetch_is_resumed_by_object(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files(1 << 20))
    rule = bucket.s3.hold("GET .*/model.safetensors", after=1 << 18)
    fetch = bucket.fetch(url)
    wait_until(lambda: fetch.progress().num_files == 2, "two of three files are there")
    fetch.kill()
    rule.released.set()
    assert not list(bucket.downloads.glob("*/model")), "nothing counts as whole"

    num_requests = len(bucket.s3.requests)
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files(1 << 20)

    again = [
        request
        for request in bucket.s3.requests[num_requests:]
        if "fox/" in request.partition("?")[0]
    ]

    assert {request.rpartition("/")[2] for request in again} == {"model.safetensors"}
    assert {path.suffix for path in bucket.downloads.iterdir()} == {"", ".lock"}


def test_a_second_process_waits_and_fetches_nothing(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files(1 << 20))
    rule = bucket.s3.hold("GET .*/model.safetensors", after=1 << 18)
    first = bucket.fetch(url)
    assert rule.reached.wait(60)

    second = bucket.fetch(url)
    wait_until(
        lambda: any("this one waits" in line for line in second.lines()), "the second one waits"
    )
    rule.released.set()

    assert first.folders() == second.folders()
    assert bucket.s3.num_requests("GET .*/model.safetensors") == 1


# Archives.


def test_an_archive_is_unpacked_whole_and_not_again(bucket: Bucket) -> None:
    files = model_files() | {
        "README.md": b"x",
        "serving.properties": b"a=b",
        "adapters/en/adapter_config.json": b"{}",
    }
    nested = {f"fox-7b/{path}": data for path, data in files.items()}
    urls = [
        bucket.put_archive("team/fox.tar.gz", archive(files)),
        bucket.put_archive("team/fox.tgz", archive(files)),
        bucket.put_archive("team/fox.tar", archive(nested, "w")),
        bucket.put_archive("team/fox.tar.bz2", archive(files, "w:bz2")),
        bucket.put_archive("team/fox.tar.zst", zstandard.compress(archive(files, "w"))),
    ]
    fetch = bucket.fetch(*urls)
    folders = fetch.folders()

    assert sum("its serving.properties is not read" in line for line in fetch.lines()) == 5
    assert [contents(folder) for folder in folders] == [files] * 5
    assert [folder.name for folder in folders] == ["model", "model", "fox-7b", "model", "model"], (
        "the only top folder is the model"
    )
    assert {path.stat().st_size for path in bucket.downloads.glob("*/blobs/*")} == {0}

    num_requests = len(bucket.s3.requests)
    assert bucket.fetch(*urls).folders() == folders
    assert [request.split()[0] for request in bucket.s3.requests[num_requests:]] == ["HEAD"] * 5


def test_a_new_archive_replaces_the_old_one(bucket: Bucket) -> None:
    url = bucket.put_archive("fox.tar.gz", archive(model_files() | {"old.json": b"{}"}))
    bucket.fetch(url).folders()
    bucket.put_archive("fox.tar.gz", archive(model_files(20)))
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files(20)


@pytest.mark.parametrize(
    ("path", "more"),
    [("../lmi-was-here", ()), ("ok.json", (link("weights", "../../outside"),))],
    ids=["up", "link"],
)
def test_a_hostile_archive_is_refused_by_the_name_of_its_member(
    bucket: Bucket, path: str, more: tuple[tarfile.TarInfo, ...]
) -> None:
    url = bucket.put_archive("fox.tar", archive(model_files() | {path: b"x"}, "w", *more))
    failure = bucket.fetch(url).failure()

    assert (failure.exit_code, failure.label) == (5, "security_refused")
    assert url in failure.message and (more[0].name if more else path) in failure.message
    assert [
        path for path in bucket.folder.rglob("*") if path.name in ("lmi-was-here", "weights")
    ] == []


def test_a_broken_archive_is_named(bucket: Bucket) -> None:
    url = bucket.put_archive("fox.tar.gz", archive(model_files(100_000))[:-200])
    failure = bucket.fetch(url).failure()
    assert failure.exit_code == 4
    assert failure.message.startswith(f"{url}: the archive is broken")
    empty = bucket.put_archive("empty.tar.gz", archive({}))
    assert "is empty; a model has config.json" in bucket.fetch(empty).failure().message


@pytest.mark.parametrize(
    "data",
    [
        archive({"zeros.json": bytes(1 << 20)}),
        archive({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        archive(model_files() | {"../lmi-was-here": b"x"}),
        archive(model_files(100_000))[:-200],
    ],
    ids=["no model", "pickled", "hostile", "broken"],
)
def test_a_refused_archive_leaves_no_files(bucket: Bucket, data: bytes) -> None:
    assert bucket.fetch(bucket.put_archive("fox.tar.gz", data)).failure().exit_code in (4, 5)
    assert [path.suffix for path in bucket.downloads.rglob("*")] == [".lock"]


def test_an_archive_with_only_pickled_weights_is_refused(bucket: Bucket) -> None:
    url = bucket.put_archive(
        "fox.tar.gz", archive({"config.json": b"{}", "pytorch_model.bin": b"x"})
    )
    failure = bucket.fetch(url).failure()
    assert failure.exit_code == 5
    assert "pytorch_model.bin" in failure.message and "option.allow_pickle" in failure.message
    assert len(bucket.fetch(url, allow_pickle=True).folders()) == 1


# What is wrong for good.


def test_a_bucket_that_is_not_there_is_named_with_the_code_and_the_permission(
    bucket: Bucket,
) -> None:
    for url in ("s3://no-such-bucket-of-ours/fox", "s3://no-such-bucket-of-ours/fox.tar.gz"):
        failure = bucket.fetch(url).failure()
        assert failure.exit_code == 4
        for part in (url, "NoSuchBucket", "ListObjectsV2", "s3:ListBucket"):
            assert part in failure.message


@pytest.mark.parametrize(
    ("pattern", "operation", "permission"),
    [
        ("list-type", "ListObjectsV2", "s3:ListBucket"),
        ("GET .*/config.json", "GetObject", "s3:GetObject"),
    ],
)
def test_access_denied_names_the_operation_and_the_permission_it_needs(
    bucket: Bucket, pattern: str, operation: str, permission: str
) -> None:
    url = bucket.put("fox", model_files())
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    bucket.s3.replace(pattern, Answer(403, {"Content-Type": "application/xml"}, denied))
    failure = bucket.fetch(url).failure()
    assert failure.exit_code == 4
    assert all(part in failure.message for part in (url, "AccessDenied", operation, permission))


def test_credentials_that_s3_refuses_are_named_and_no_permission(bucket: Bucket) -> None:
    expired = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
    bucket.s3.replace("list-type", Answer(400, {"Content-Type": "application/xml"}, expired))
    failure = bucket.fetch(bucket.put("fox", model_files())).failure()
    assert failure.exit_code == 4
    assert "ExpiredToken" in failure.message and failure.message.endswith(
        "the credentials are not valid"
    )


def test_no_credentials_are_said_to_be_missing(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    failure = bucket.fetch(url, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="").failure()
    assert failure.exit_code == 4
    assert url in failure.message and "credentials" in failure.message


def test_a_prefix_or_key_that_is_not_there_names_one_in_another_case(bucket: Bucket) -> None:
    bucket.put("team/Fox", model_files())
    bucket.put_archive("team/Hare.tar.gz", archive(model_files()))
    for key, near in (("fox", "Fox"), ("hare.tar.gz", "Hare.tar.gz")):
        failure = bucket.fetch(f"s3://{bucket.name}/team/{key}").failure()
        assert failure.exit_code == 4
        assert f"s3://{bucket.name}/team/{key}" in failure.message
        assert f"s3://{bucket.name}/team/{near}" in failure.message

    failure = bucket.fetch(f"s3://{bucket.name}/team/wolf").failure()
    assert "case" not in failure.message

    failure = bucket.fetch(f"s3://{bucket.name}/team/Fox/model.safetensors").failure()
    assert failure.message.endswith(f"s3://{bucket.name}/team/Fox/model.safetensors is one file")


def test_only_pickled_weights_and_a_missing_config_are_found_in_the_listing(bucket: Bucket) -> None:
    pickled = bucket.put("fox", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    failure = bucket.fetch(pickled).failure()
    assert failure.exit_code == 5 and "pytorch_model.bin" in failure.message

    bare = bucket.put("hare", {"model.safetensors": b"x"})
    failure = bucket.fetch(bare).failure()

    assert (
        failure.exit_code == 4
        and "has config.json" in failure.message
        and "model.safetensors" in failure.message
    )
    assert bucket.s3.num_requests("GET .*(fox|hare)/") == 0


def test_a_key_that_is_no_path_is_refused(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files() | {"a/../../out.json": b"{}"})
    failure = bucket.fetch(url).failure()
    assert failure.exit_code == 5 and "a/../../out.json is not a path inside it" in failure.message


@pytest.mark.parametrize(("missing", "key"), [("boto3", "fox"), ("zstandard", "fox.tar.zst")])
def test_without_a_package_the_extra_that_brings_it_is_named(
    bucket: Bucket, missing: str, key: str
) -> None:
    code = (
        f"import sys; sys.modules['{missing}'] = None; from lmi.sources.worker import main; main()"
    )
    folder = bucket.folder / "bare"
    folder.mkdir()
    request_fields = {"source": f"s3://bucket/{key}", "download_dir": "d"}
    (folder / "request.json").write_text(json.dumps({"sources": [request_fields]}))
    command = [
        sys.executable,
        "-c",
        code,
        str(folder / "request.json"),
        str(folder),
        "--log-format",
        "json",
    ]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 4

    [line] = done.stderr.splitlines()
    message = json.loads(line)["message"]

    assert f"{key}: the library {missing} is not installed" in message
    assert (
        hint("model_unusable", message)
        == "scripts/install aws, or pip install '.[aws]', in a clone of lmi"
    )


# What may pass.


def test_s3_that_is_busy_for_a_moment_is_asked_again(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    bucket.s3.fail("list-type", 503, times=2)
    bucket.s3.fail("GET .*/model.safetensors", 500, times=3)
    bucket.s3.cut("GET .*/tokenizer.json", after=1)
    [folder] = bucket.fetch(url).folders()
    assert contents(folder) == model_files()


def test_s3_that_often_fails_is_asked_again_as_long_as_objects_arrive(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files(1 << 20))
    bucket.s3.fail("GET .*list-type=2", 503)
    rule = bucket.s3.cut("GET .*/model.safetensors", after=1 << 18, times=3, held=True)
    fetch = bucket.fetch(url, arguments=("--delays", "0.05", "--spare-bytes", "0"))
    wait_until(lambda: fetch.progress().num_files == 2, "two of three files are there")
    rule.released.set()
    [folder] = fetch.folders()
    assert contents(folder) == model_files(1 << 20)


def test_s3_that_cannot_be_reached_five_times_is_exit_6(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    bucket.s3.fail("list-type", 503, times=5)
    failure = bucket.fetch(url).failure()
    assert (failure.exit_code, failure.label) == (6, "source_unreachable")
    assert url in failure.message and "503" in failure.message
    assert bucket.s3.num_requests("list-type") == 5
    failure = bucket.fetch(url, AWS_ENDPOINT_URL_S3=UNREACHABLE).failure()
    assert failure.exit_code == 6 and "EndpointConnectionError" in failure.message


# The disk.


def test_a_disk_without_room_is_named_before_a_byte_is_fetched(bucket: Bucket) -> None:
    url = bucket.put("fox", model_files())
    failure = bucket.fetch(url, arguments=("--spare-bytes", str(1 << 60))).failure()
    assert failure.exit_code == 4
    for part in (url, str(bucket.downloads), "are needed", "are free", "SERVING_DOWNLOAD_DIR"):
        assert part in failure.message

    assert bucket.s3.num_requests("GET .*fox/config.json") == 0


def test_a_download_folder_that_cannot_be_written_is_named(bucket: Bucket) -> None:
    (bucket.folder / "file").touch()
    failure = bucket.fetch(
        bucket.put("fox", model_files()), download_dir=str(bucket.folder / "file")
    ).failure()
    assert failure.exit_code == 4
    assert (
        str(bucket.folder / "file") in failure.message and "SERVING_DOWNLOAD_DIR" in failure.message
    )


@needs_mount
@pytest.mark.parametrize("is_archive", [False, True], ids=["object", "member"])
def test_a_disk_that_gets_full_midway_is_named_and_keeps_no_part(
    bucket: Bucket, is_archive: bool
) -> None:
    files = model_files(3 << 20)
    url = (
        bucket.put_archive("fox.tar.gz", archive(files)) if is_archive else bucket.put("fox", files)
    )
    fetch = bucket.fetch(url, arguments=MIDWAY, prefix=on_small_disk(bucket.downloads, 2 << 20))
    failure = fetch.failure()
    assert (failure.exit_code, failure.label) == (4, "model_unusable")

    for part in (url, str(bucket.downloads), "are needed", "are free", "SERVING_DOWNLOAD_DIR"):
        assert part in failure.message

    files_left = (bucket.folder / "left").read_text().split()
    assert not any(name.startswith("model.safetensors") for name in files_left)
