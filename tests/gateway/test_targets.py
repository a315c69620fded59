"""TargetModel through the gateway: models of a folder, loaded when they are named and unloaded for
others.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.gateway.gateways import Gateway, gateway, scripted, whole
from tests.gateway.model_server import ModelServer, write_model
from tests.sources.s3_server import S3Server, moto
from tests.system.container import wait_until


class Store:
    """A multi-model endpoint: its models, the folder that gateway and container share, and both of
    them.
    """

    def __init__(
        self, folder: Path, server: ModelServer, aws: Gateway, flags: Sequence[str]
    ) -> None:
        self.source = folder / "source"
        self.models_dir = folder / "models"
        self.server = server
        self.aws = aws
        self.flags = flags

    def invoke(self, target: str, **parameters: str) -> dict[str, Any]:
        answer = self.aws.invoke(b"hello", TargetModel=target, **parameters)
        body: dict[str, Any] = json.loads(answer["Body"].read())
        return body

    def refusal(self, target: str) -> dict[str, Any]:
        with pytest.raises(ClientError) as caught:
            self.invoke(target)

        error_response: dict[str, Any] = caught.value.response
        return error_response

    def name(self, target: str) -> str:
        return hashlib.sha256(f"{self.source}/{target}".encode()).hexdigest()[:32]


def write_archive(file: Path, say: str, member: str = "say.txt") -> None:
    with tarfile.open(file, "w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size = len(say)
        archive.addfile(info, io.BytesIO(say.encode()))


@contextmanager
def store(folder: Path, num_places: int = 2, *flags: str) -> Iterator[Store]:
    source = folder / "source"
    for name in "abc":
        write_model(source / "deep" / name, f"I am {name}")

    write_archive(source / "d.tar.gz", "I am d")
    server = ModelServer(num_places)
    with scripted(server) as container:
        command = (
            "--endpoint",
            container.url,
            "--models",
            str(source),
            "--models-dir",
            str(folder / "models"),
            *flags,
        )
        with gateway(*command) as aws:
            yield Store(folder, server, aws, command)


def test_a_folder_or_an_archive_is_loaded_when_it_is_first_named(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        for _ in range(2):
            body = mme.invoke("deep/a")
            assert body == {"say": "I am a", "target": "deep/a", "body": "hello"}
            assert mme.invoke("d.tar.gz")["say"] == "I am d"

        assert mme.server.loaded == {mme.name("deep/a"): "I am a", mme.name("d.tar.gz"): "I am d"}
        assert mme.server.num_calls("POST") == 2
        assert (mme.models_dir / mme.name("d.tar.gz") / "model" / "say.txt").read_text() == "I am d"


def test_an_archive_with_one_folder_is_that_folder(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        write_archive(mme.source / "e.tgz", "I am e", "e-7b/say.txt")
        assert mme.invoke("e.tgz")["say"] == "I am e"


def test_the_least_recently_used_model_is_unloaded_for_another(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        for target in ("deep/a", "deep/b", "deep/a", "deep/c"):
            assert mme.invoke(target)["say"] == f"I am {target[-1]}"

        assert set(mme.server.loaded) == {mme.name("deep/a"), mme.name("deep/c")}
        assert mme.invoke("deep/b")["say"] == "I am b"
        assert set(mme.server.loaded) == {mme.name("deep/b"), mme.name("deep/c")}


def test_a_model_that_serves_a_request_is_not_unloaded_and_the_other_is_refused(
    tmp_path: Path,
) -> None:
    with store(tmp_path, 1) as mme, ThreadPoolExecutor() as pool:
        mme.server.may_answer.clear()
        running = pool.submit(mme.invoke, "deep/a")
        wait_until(lambda: mme.server.loaded, "a is loaded")
        refused = mme.refusal("deep/b")
        assert refused["Error"]["Code"] == "ModelError" and refused["OriginalStatusCode"] == 507
        assert json.loads(refused["OriginalMessage"]) == {"error": "no room", "code": 507}
        mme.server.may_answer.set()
        assert running.result()["say"] == "I am a"
        assert mme.invoke("deep/b")["say"] == "I am b"


def test_clients_that_name_one_model_at_once_share_one_load(tmp_path: Path) -> None:
    with store(tmp_path) as mme, ThreadPoolExecutor(8) as pool:
        mme.server.may_load.clear()
        answers = [pool.submit(mme.invoke, "deep/a") for _ in range(8)]
        wait_until(lambda: mme.aws.says("loading model"), "the load began")
        mme.server.may_load.set()
        assert [answer.result()["say"] for answer in answers] == ["I am a"] * 8
        assert mme.server.num_calls("POST") == 1


def test_models_that_take_each_others_room_are_served_or_find_no_room(tmp_path: Path) -> None:
    def ask(target: str) -> int:
        try:
            return 200 if mme.invoke(target)["say"][-1] == target[-1] else 0
        except ClientError as error:
            return int(error.response["OriginalStatusCode"])

    with store(tmp_path) as mme, ThreadPoolExecutor(4) as pool:
        statuses = Counter(pool.map(ask, ["deep/a", "deep/b", "deep/c"] * 10))

    assert set(statuses) <= {200, 507} and statuses[200] > 10


def test_a_model_that_loads_for_longer_than_the_timeout_is_not_ready_and_later_is(
    tmp_path: Path,
) -> None:
    with store(tmp_path, 2, "--timeout", "2") as mme:
        mme.server.may_load.clear()
        refused = mme.refusal("deep/a")
        assert refused["Error"]["Code"] == "ModelNotReadyException"
        assert refused["ResponseMetadata"]["HTTPStatusCode"] == 429
        mme.server.may_load.set()
        wait_until(lambda: mme.server.loaded, "the load went on")
        assert mme.invoke("deep/a")["say"] == "I am a"
        assert mme.server.num_calls("POST") == 1


def test_a_target_is_a_folder_or_an_archive_below_the_source(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        (mme.source / "out").symlink_to("/etc")
        spelled = (
            "/deep/a",
            "../source/deep/a",
            "deep/../deep/a",
            "./deep/a",
            "deep/./a",
            "deep//a",
            "deep/a/",
        )
        for target in (*spelled, "d.tar.gz/", "nobody", "deep/a/say.txt", "out"):
            refused = mme.refusal(target)
            assert (refused["Error"]["Code"], refused["ResponseMetadata"]["HTTPStatusCode"]) == (
                "ValidationError",
                400,
            )
            assert target in refused["Error"]["Message"]

        assert not mme.server.calls


def test_a_model_that_cannot_be_laid_out_or_loaded_is_a_model_error_with_its_cause(
    tmp_path: Path,
) -> None:
    with store(tmp_path) as mme:
        (mme.source / "broken.tar.gz").write_bytes(b"nothing")
        write_archive(mme.source / "hostile.tar", "x", "../../x")
        write_archive(mme.source / "other.tar", "x", "no-model")
        for target, status in (("broken.tar.gz", 0), ("hostile.tar", 0), ("other.tar", 400)):
            refused = mme.refusal(target)
            assert (refused["Error"]["Code"], refused["OriginalStatusCode"]) == (
                "ModelError",
                status,
            )

        assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "source"]
        assert mme.invoke("deep/a")["say"] == "I am a"


def test_a_link_in_a_folder_that_leads_out_of_the_source_is_refused(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        shared = mme.source / "shared"
        model = mme.source / "deep" / "a"
        (shared / "more").mkdir(parents=True)
        (shared / "notes").write_text("x")
        (model / "notes").symlink_to(shared / "notes")
        (model / "round").symlink_to(model)
        (model / "shared").symlink_to(shared)
        (shared / "more" / "passwd").symlink_to("/etc/passwd")
        refused = mme.refusal("deep/a")

        assert (refused["Error"]["Code"], refused["OriginalStatusCode"]) == ("ModelError", 0)
        assert "the link shared/more/passwd leads out of the source" in refused["OriginalMessage"]

        (shared / "more" / "passwd").unlink()
        (model / "round").unlink()

        assert mme.invoke("deep/a")["say"] == "I am a"


def test_an_archive_is_unpacked_only_where_the_disk_has_room(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        info = tarfile.TarInfo("weights.bin")
        info.size = 1 << 50
        (mme.source / "vast.tar").write_bytes(info.tobuf() + bytes(1 << 20))
        refused = mme.refusal("vast.tar")
        assert (
            refused["Error"]["Code"] == "ModelError"
            and "models is full" in refused["OriginalMessage"]
        )
        assert list(mme.models_dir.rglob("weights.bin")) == []


def test_a_container_that_lost_its_models_loads_them_again(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        mme.invoke("deep/a")
        mme.server.loaded.clear()
        assert mme.invoke("deep/a")["say"] == "I am a"


def test_a_model_whose_files_changed_is_loaded_anew(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        mme.invoke("deep/a")
        shutil.rmtree(mme.source / "deep" / "a")
        write_model(mme.source / "deep" / "a", "I am the second")
        mme.server.loaded.clear()
        assert mme.invoke("deep/a")["say"] == "I am the second"


def test_a_later_gateway_unloads_what_an_earlier_one_loaded(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        mme.invoke("deep/a")
        mme.invoke("deep/b")
        with gateway(*mme.flags) as later:
            answer = later.invoke(b"hello", TargetModel="deep/c")
            assert json.loads(answer["Body"].read())["say"] == "I am c"

        assert len(mme.server.loaded) == 2


def test_an_endpoint_without_models_and_a_container_without_routes_for_them_say_so(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "source" / "a", "I am a")
    off = whole(b'{"error": "start it with SAGEMAKER_MULTI_MODEL=true", "code": 404}', 404)
    flags = ("--models", f"multi={tmp_path / 'source'}", "--models-dir", str(tmp_path / "models"))
    with scripted(off) as container, gateway("--endpoint", container.url, *flags) as aws:
        with pytest.raises(ClientError, match="Endpoint any is not a multi-model endpoint"):
            aws.invoke(TargetModel="a")

        with pytest.raises(ClientError, match="SAGEMAKER_MULTI_MODEL"):
            aws.invoke(endpoint="multi", TargetModel="a")


def test_an_invocation_of_several_models_without_a_target_is_told_so(tmp_path: Path) -> None:
    with store(tmp_path) as mme:
        mme.invoke("deep/a")
        for ask in (mme.aws.invoke, mme.aws.stream):
            with pytest.raises(
                ClientError,
                match="ValidationError.*any is a multi-model endpoint: TargetModel must",
            ):
                ask()


def test_models_may_be_prefixes_and_archives_in_s3(tmp_path: Path) -> None:
    write_model(tmp_path / "whole", "I am in an archive")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "whole" / name).write_text("{}")

    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "whole", "whole")

    objects = {
        f"models/a/{file.name}": file.read_bytes() for file in (tmp_path / "whole").iterdir()
    }
    (tmp_path / "moto").mkdir()
    server = ModelServer()
    with moto(tmp_path / "moto") as port, S3Server(port) as s3, scripted(server) as container:
        s3.client.create_bucket(Bucket="bucket")
        s3.put(
            "bucket",
            {
                **objects,
                "models/a/say.txt": b"I am a",
                "models/b.tar.gz": (tmp_path / "b.tar.gz").read_bytes(),
            },
        )
        flags = (
            "--models",
            "s3://bucket/models/",
            "--models-dir",
            str(tmp_path / "models"),
            "--s3-endpoint",
            s3.url,
        )
        with gateway("--endpoint", container.url, *flags, environ=s3.environ) as aws:
            mme = Store(tmp_path, server, aws, flags)
            assert mme.invoke("a")["say"] == "I am a"
            assert mme.invoke("b.tar.gz")["say"] == "I am in an archive"

            refused = mme.refusal("nobody")
            assert (
                refused["OriginalStatusCode"] == 0
                and "s3://bucket/models/nobody" in refused["OriginalMessage"]
            )
