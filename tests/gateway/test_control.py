"""The control plane of the gateway, asked by AWS's own client: from CreateModel to
DeleteEndpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError, WaiterError

from lmi.gateway.control.operations import OPERATIONS
from lmi.gateway.control.resources import ENDPOINT, common
from lmi.gateway.control.service_model import compiled
from lmi.gateway.errors import AwsError
from lmi.shared.processes import descendants, is_alive
from tests.gateway.control_planes import BODY, IMAGE, STREAM, ControlPlane, control_plane
from tests.gateway.gateways import CREDENTIALS
from tests.gateway.test_gateway import fails
from tests.sources.s3_server import S3Server, moto
from tests.system.container import ENVIRON, ROOT, wait_until, write_model

ARN = "arn:aws:sagemaker:eu-central-1:000000000000:"
NUM_HOSTILE_BODIES = 200
# Of a partition that a router of this one does not reach.
FOREIGN_TARGET = {
    "Name": "a",
    "Destinations": [{"ResourceArn": "arn:aws-cn:sagemaker:cn:000000000000:endpoint/a"}],
}
# With hostile bytes, or of what is not there.
NAMES = ("../m", "m/../../etc", "", "a" * 64, "m\0", "m\n", "ｍ", "-m", "m%2e%2e", "${m}", "\ud7ff")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane"), "--max-containers", "5") as running:
        running.model("echo")
        running.model("other")
        running.model("broken", "broken")
        running.config("echo", "echo")
        yield running


def test_an_endpoint_is_created_invoked_described_and_deleted(plane: ControlPlane) -> None:
    plane.create("chat", "echo")
    assert plane.describe("chat")["EndpointStatus"] == "Creating"
    with fails("ValidationError", 400) as error:
        plane.aws.invoke(BODY, "chat")

    assert error["Error"]["Message"] == "Endpoint chat of account 000000000000 not found."

    plane.wait_in_service("chat")
    assert plane.variant("chat") == "echo"
    with closing(plane.aws.stream(STREAM, "chat")["Body"]) as events:
        lines = b"".join(event["PayloadPart"]["Bytes"] for event in events).splitlines()

    assert json.loads(lines[-1])["generated_text"] == "hello"

    accepted = plane.aws.runtime.invoke_endpoint_async(EndpointName="chat", Body=BODY)
    output = Path(accepted["OutputLocation"].removeprefix("file://"))
    wait_until(output.exists, "the asynchronous answer is there")
    assert json.loads(output.read_bytes()) == {"generated_text": "hello"}

    description = plane.describe("chat")
    del description["ResponseMetadata"]
    assert description.pop("CreationTime") < description.pop("LastModifiedTime")
    [variant] = description.pop("ProductionVariants")
    assert variant.pop("DeployedImages") == [{"SpecifiedImage": IMAGE, "ResolvedImage": IMAGE}]
    assert variant == {
        "VariantName": "echo",
        "CurrentWeight": 1.0,
        "DesiredWeight": 1.0,
        "CurrentInstanceCount": 1,
        "DesiredInstanceCount": 1,
    }
    assert description == {
        "EndpointName": "chat",
        "EndpointArn": f"{ARN}endpoint/chat",
        "EndpointConfigName": "echo",
        "EndpointStatus": "InService",
    }

    plane.delete("chat")
    with fails("ValidationException", 400) as error:
        plane.describe("chat")

    assert error["Error"]["Message"] == f'Could not find endpoint "{ARN}endpoint/chat".'
    with fails("ValidationError", 400):
        plane.aws.invoke(BODY, "chat")


def test_an_update_fails_no_request_and_a_failed_one_goes_back(plane: ControlPlane) -> None:
    plane.config("blue", "echo")
    plane.config("green", "other")
    plane.config("red", "broken")
    plane.create("live", "blue")
    plane.wait_in_service("live")

    is_over = threading.Event()
    # Of each client, since a request of another may have begun before and end later.
    variants: list[list[str]] = [[], [], []]
    failures: list[Exception] = []

    def ask(answered: list[str]) -> None:
        while not is_over.is_set():
            try:
                answered.append(plane.variant("live"))
            except Exception as error:
                failures.append(error)

    clients = [threading.Thread(target=ask, args=(answered,)) for answered in variants]
    for client in clients:
        client.start()

    try:
        plane.control.update_endpoint(EndpointName="live", EndpointConfigName="green")
        with fails("ValidationException", 400) as error:
            plane.control.update_endpoint(EndpointName="live", EndpointConfigName="blue")

        assert (
            error["Error"]["Message"] == f'Cannot update in-progress endpoint "{ARN}endpoint/live".'
        )
        assert plane.describe("live")["PendingDeploymentSummary"]["EndpointConfigName"] == "green"
        plane.wait_in_service("live")

        plane.control.update_endpoint(EndpointName="live", EndpointConfigName="red")
        description = plane.wait_settled("live")
    finally:
        is_over.set()
        for client in clients:
            client.join()

    assert failures == []
    for answered in variants:
        assert answered[0] == "echo" and answered[-1] == "other"
        assert answered == sorted(answered), "the former variant answered after the new one"

    assert description["EndpointStatus"] == "InService"
    assert description["EndpointConfigName"] == "green"
    assert "production variant broken" in description["FailureReason"]
    assert "holds notes.txt" in description["FailureReason"]
    assert plane.variant("live") == "other"
    plane.delete("live")


def test_a_configuration_says_where_answers_of_asynchronous_requests_go(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.mkdir()
    with control_plane(tmp_path, "--async-bucket", f"answers={answers}") as plane:
        plane.model("echo")
        variant = {"VariantName": "echo", "ModelName": "echo", "InitialInstanceCount": 1}
        variant["InstanceType"] = "ml.g6.2xlarge"

        def create(output: str, failure: str) -> None:
            places = {"S3OutputPath": output, "S3FailurePath": failure}
            plane.control.create_endpoint_config(
                EndpointConfigName="later",
                ProductionVariants=[variant],
                AsyncInferenceConfig={"OutputConfig": places},
            )

        for output, rule in (
            ("s3://models/echo", "a bucket that --async-bucket allows"),
            ("s3://answers/../control", "no part that is empty, . or .."),
        ):
            with fails("ValidationException", 400) as error:
                create(output, "s3://answers/failed")

            assert rule in error["Error"]["Message"]

        create("s3://answers/a/b/", "s3://answers/failed")
        plane.create("later", "later")
        plane.wait_in_service("later")

        invoke = plane.aws.runtime.invoke_endpoint_async
        good = invoke(
            EndpointName="later", Body=BODY, Filename="one.json", S3OutputPathExtension="c"
        )
        bad = invoke(EndpointName="later", Body=b"{}")
        assert good["OutputLocation"] == "s3://answers/a/b/c/one.json"
        assert bad["FailureLocation"].startswith("s3://answers/failed/")

        output = answers / "a/b/c/one.json"
        failure = answers / bad["FailureLocation"].removeprefix("s3://answers/")
        wait_until(lambda: output.exists() and failure.exists(), "both have their files")
        assert json.loads(output.read_bytes()) == {"generated_text": "hello"}
        assert json.loads(failure.read_bytes())["OriginalStatusCode"] == 424
        assert len(list(answers.rglob("*.*"))) == 2

        # Killed with its endpoint, which comes back before what was accepted runs.
        accepted = [invoke(EndpointName="later", Body=BODY) for _ in range(20)]
        os.kill(plane.aws.process.pid, signal.SIGKILL)

    # Where the bucket is no longer allowed, nothing is accepted that cannot be answered.
    with control_plane(tmp_path, "--async-queue", str(tmp_path / "other")) as plane:
        plane.wait_in_service("later")
        with pytest.raises(ClientError, match="--async-bucket allows"):
            plane.aws.runtime.invoke_endpoint_async(EndpointName="later", Body=BODY)

    files = [
        answers / answer["OutputLocation"].removeprefix("s3://answers/") for answer in accepted
    ]
    with control_plane(tmp_path, "--async-bucket", f"answers={answers}"):
        wait_until(lambda: all(file.exists() for file in files), "each has its answer")

    assert len(list(answers.rglob("*.*"))) == 22


def test_variants_share_requests_by_weight_and_are_resized(plane: ControlPlane) -> None:
    plane.config("two", "echo", "other")
    plane.create("two", "two")
    plane.wait_in_service("two")

    shares = Counter(plane.variant("two") for _ in range(40))
    assert set(shares) == {"echo", "other"}
    assert plane.variant("two", TargetVariant="other") == "other"
    with fails("ValidationError", 400) as error:
        plane.variant("two", TargetVariant="third")

    assert error["Error"]["Message"] == "Variant third of endpoint two not found."

    sizes = [
        {"VariantName": "echo", "DesiredWeight": 0.0},
        {"VariantName": "other", "DesiredInstanceCount": 2},
    ]
    plane.control.update_endpoint_weights_and_capacities(
        EndpointName="two", DesiredWeightsAndCapacities=sizes
    )
    plane.wait_in_service("two")
    echo, other = plane.describe("two")["ProductionVariants"]
    assert (echo["CurrentWeight"], echo["CurrentInstanceCount"]) == (0.0, 1)
    assert (other["CurrentWeight"], other["CurrentInstanceCount"]) == (1.0, 2)
    assert {plane.variant("two") for _ in range(10)} == {"other"}

    sizes = [{"VariantName": "echo", "DesiredInstanceCount": 4}]
    with fails("ResourceLimitExceeded", 400) as error:
        plane.control.update_endpoint_weights_and_capacities(
            EndpointName="two", DesiredWeightsAndCapacities=sizes
        )

    assert "--max-containers" in error["Error"]["Message"]
    assert plane.describe("two")["EndpointStatus"] == "InService"
    plane.delete("two")


def test_an_endpoint_that_cannot_be_served_fails_with_its_reason(plane: ControlPlane) -> None:
    plane.config("broken", "broken")
    plane.create("broken", "broken")
    with pytest.raises(WaiterError, match="Failed"):
        plane.wait_in_service("broken")

    description = plane.describe("broken")
    assert "holds notes.txt; a model's folder has a config.json" in description["FailureReason"]
    assert str(plane.folder) not in description["FailureReason"]
    with fails("ValidationException", 400):
        plane.control.update_endpoint(EndpointName="broken", EndpointConfigName="echo")

    plane.delete("broken")


def test_what_is_taken_or_not_there_is_refused_in_aws_words(plane: ControlPlane) -> None:
    def message(call: Any, **members: Any) -> str:
        with fails("ValidationException", 400) as error:
            call(**members)

        text: str = error["Error"]["Message"]
        return text

    control = plane.control
    container = {"Image": IMAGE}
    taken = message(control.create_model, ModelName="echo", PrimaryContainer=container)
    assert taken == f'Cannot create already existing model "{ARN}model/echo".'
    missing = message(control.create_endpoint, EndpointName="a", EndpointConfigName="none")
    assert missing == f'Could not find endpoint configuration "{ARN}endpoint-config/none".'
    missing = message(control.delete_model, ModelName="none")
    assert missing == f'Could not find model "{ARN}model/none".'

    bad_count = {
        "VariantName": "a",
        "ModelName": "echo",
        "InitialInstanceCount": 1,
        "InstanceType": "g6.2xlarge",
    }
    refused = message(
        control.create_endpoint_config, EndpointConfigName="b", ProductionVariants=[bad_count]
    )
    assert refused.startswith(
        "1 validation error detected: Value 'g6.2xlarge' at "
        "'productionVariants.1.member.instanceType' failed to satisfy constraint: Member must "
        "satisfy enum value set: [ml.t2.medium, "
    )


def test_resources_are_listed_by_pages_order_and_filters(plane: ControlPlane) -> None:
    for name in ("list-b", "list-a", "list-c"):
        plane.model(name)

    pages = plane.control.get_paginator("list_models")

    def names(**query: Any) -> list[str]:
        answers = pages.paginate(NameContains="list-", PaginationConfig={"PageSize": 2}, **query)
        return [model["ModelName"] for answer in answers for model in answer["Models"]]

    assert names() == ["list-c", "list-a", "list-b"]
    assert names(SortBy="Name", SortOrder="Ascending") == ["list-a", "list-b", "list-c"]
    assert names(CreationTimeBefore=1) == []
    [config] = plane.control.list_endpoint_configs(NameContains="echo")["EndpointConfigs"]
    assert config["EndpointConfigArn"] == f"{ARN}endpoint-config/echo"
    with fails("ValidationException", 400):
        plane.control.list_models(NextToken="-1")


def test_tags_are_added_listed_and_deleted(plane: ControlPlane) -> None:
    control = plane.control
    arn = control.create_model(
        ModelName="tagged",
        PrimaryContainer={"Image": IMAGE},
        Tags=[{"Key": "team", "Value": "Grün 1"}],
    )["ModelArn"]
    control.add_tags(ResourceArn=arn, Tags=[{"Key": "cost", "Value": "7"}])
    tags = {tag["Key"]: tag["Value"] for tag in control.list_tags(ResourceArn=arn)["Tags"]}
    assert tags == {"team": "Grün 1", "cost": "7"}

    control.delete_tags(ResourceArn=arn, TagKeys=["team"])
    assert control.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "cost", "Value": "7"}]
    with fails("ResourceNotFound", 400):
        control.list_tags(ResourceArn=f"{ARN}model/none")


# What clients must not reach.


@pytest.mark.parametrize(
    ("container", "rule"),
    [
        ({"ModelDataUrl": "s3://others/model.tar.gz"}, "--bucket allows"),
        ({"ModelDataUrl": "s3://models/../control"}, "no part that is empty, . or .."),
        ({"ModelDataUrl": "s3://models/"}, "no part that is empty, . or .."),
        ({"ModelDataUrl": "file:///etc"}, "regular expression pattern"),
        ({"ModelDataUrl": "https://models/echo"}, "must be at s3://BUCKET/KEY"),
        ({"Environment": {"HF_MODEL_ID": "/etc"}}, "must not name a folder of this machine"),
        ({"Environment": {"SM_LLAMA_CPP_MODEL_DIR": "/etc"}}, "must not name a folder"),
        ({"Environment": {"SM_VLLM_CHAT_TEMPLATE": '["/etc/hosts"]'}}, "must not name a folder"),
        ({"Environment": {"SM_SGLANG_CHAT_TEMPLATE": "/etc/hosts"}}, "must not name a folder"),
        ({"Environment": {"OPTION_MODEL_ID": "a\0b"}}, "NUL"),
        ({"Environment": {"A B": "c"}}, "regular expression pattern"),
        ({"Environment": {f"A{n}": "x" * 1000 for n in range(40)}}, "at most 32768 bytes"),
        ({"Mode": "MultiModel"}, "MultiModel is not run"),
        ({"Image": "a b"}, "regular expression pattern"),
    ],
)
def test_a_container_that_the_operator_does_not_allow_is_refused(
    plane: ControlPlane, container: dict[str, Any], rule: str
) -> None:
    with fails("ValidationException", 400) as error:
        plane.control.create_model(
            ModelName="not-allowed", PrimaryContainer={"Image": IMAGE, **container}
        )

    assert rule in error["Error"]["Message"]


def test_a_model_reaches_no_code_and_no_file_but_its_own(plane: ControlPlane) -> None:
    """A link in the bucket, code of the model, and variables that give code to a process."""
    secrets = plane.folder / "secrets"
    secrets.mkdir()
    (secrets / "config.json").write_text("{}")
    (plane.bucket / "link").symlink_to(secrets)
    plane.model("link", "link")
    plane.config("link", "link")
    plane.create("link", "link")

    code = write_model(plane.bucket / "code")
    (code / "model.py").write_text("def handle(inputs): raise SystemExit")
    plane.model("code", "code", OPTION_ENTRYPOINT="model.py", LD_PRELOAD="/tmp/a.so")
    plane.config("code", "code")
    plane.create("code", "code")

    reason = plane.wait_settled("link")["FailureReason"]
    assert "is not below" in reason and str(plane.folder) not in reason
    assert (
        "refused by DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
        in plane.wait_settled("code")["FailureReason"]
    )
    assert plane.aws.says("variable LD_PRELOAD of a model is not passed")
    plane.delete("link")
    plane.delete("code")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_part_of_a_path_is_refused(name: str) -> None:
    """Beside botocore's patterns, which a newer version may change."""
    with pytest.raises(AwsError, match="must match"):
        common(ENDPOINT, {"EndpointName": name}, "local")


def test_model_data_may_be_in_s3_in_a_bucket_that_the_operator_names(tmp_path: Path) -> None:
    files = write_model(tmp_path / "files")
    # Without weights, and with the properties that say so: a bucket's files all come.
    objects = {f"echo/{file.name}": file.read_bytes() for file in files.iterdir()}
    (tmp_path / "moto").mkdir()
    with moto(tmp_path / "moto") as port, S3Server(port) as s3:
        s3.client.create_bucket(Bucket="real")
        s3.put("real", objects)
        flags = ["--bucket", "real", "--s3-endpoint", s3.url]
        with control_plane(tmp_path, *flags, environ=s3.environ) as plane:
            container = {"Image": IMAGE, "ModelDataUrl": "s3://real/echo/"}
            plane.control.create_model(ModelName="remote", PrimaryContainer=container)
            plane.config("remote", "remote")
            plane.create("remote", "remote")
            plane.wait_in_service("remote")

            assert plane.variant("remote") == "remote"


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield operations with bodies that are wrong in names, types, depth or bytes."""
    chance = random.Random(47)
    valid: dict[str, dict[str, Any]] = {
        "AddTags": {"ResourceArn": f"{ARN}model/none", "Tags": [{"Key": "a", "Value": "b"}]},
        "CreateEndpoint": {"EndpointName": "x", "EndpointConfigName": "none"},
        "CreateEndpointConfig": {
            "EndpointConfigName": "x",
            "ProductionVariants": [{"VariantName": "a", "ModelName": "none"}],
        },
        "CreateInferenceRouter": {"InferenceRouterName": "x", "RoutingTargets": [FOREIGN_TARGET]},
        "CreateModel": {
            "ModelName": "x",
            "PrimaryContainer": {"Image": "a", "ModelDataUrl": "s3://none/a"},
        },
        "DeleteEndpoint": {"EndpointName": "none"},
        "DescribeModel": {"ModelName": "none"},
        "ListModels": {"MaxResults": 0, "NextToken": "x"},
        "UpdateEndpoint": {"EndpointName": "none", "EndpointConfigName": "none"},
        "UpdateInferenceRouter": {"InferenceRouterName": "none", "RoutingTargets": []},
    }
    values: list[Any] = [*NAMES, None, True, -1, 1e308, 2**70, [], {}, ["a"] * 1000, "x" * 100_000]
    for _ in range(NUM_HOSTILE_BODIES):
        operation = chance.choice(sorted(valid))
        members = dict(valid[operation])
        members[chance.choice([*members, "Further"])] = chance.choice(values)
        body = json.dumps(members).encode()
        match chance.randrange(4):
            case 0:
                position = chance.randrange(len(body))
                body = body[:position] + chance.randbytes(3) + body[position + 1 :]
            case 1:
                body = b"[" * 50_000 + body
            case 2:
                body = body[: chance.randrange(len(body))]

        yield operation, body


def test_hostile_bodies_are_refused_and_change_nothing(plane: ControlPlane) -> None:
    state = plane.folder / "control" / "state.json"
    before = state.read_bytes()
    num_refused = 0
    for operation, body in hostile_bodies():
        with closing(HTTPConnection("127.0.0.1", plane.aws.port, timeout=60)) as connection:
            headers = {"X-Amz-Target": f"SageMaker.{operation}"}
            connection.request("POST", "/", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            is_valid = operation == "ListModels" and response.status == 200
            assert is_valid or (response.status == 400 and answer["__type"]), body[:200]
            num_refused += not is_valid

    assert num_refused > 0.9 * NUM_HOSTILE_BODIES
    assert state.read_bytes() == before
    assert plane.control.list_models(NameContains="echo")["Models"]


# The process.


def test_a_killed_gateway_comes_back_with_its_endpoints(tmp_path: Path) -> None:
    with control_plane(tmp_path) as plane:
        plane.model("echo")
        plane.config("echo", "echo")
        plane.create("chat", "echo")
        plane.wait_in_service("chat")
        created = plane.describe("chat")["CreationTime"]
        containers = descendants(plane.aws.process.pid)
        os.kill(plane.aws.process.pid, signal.SIGKILL)
        wait_until(
            lambda: not any(is_alive(pid) for pid in containers), "its containers have ended"
        )

    with control_plane(tmp_path) as plane:
        assert plane.describe("chat")["EndpointStatus"] == "SystemUpdating"
        plane.wait_in_service("chat")
        assert plane.describe("chat")["CreationTime"] == created
        assert plane.variant("chat") == "echo"

        [supervisor, *_] = descendants(plane.aws.process.pid)
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: plane.aws.says("is started again"), "the loss was seen")
        wait_until(lambda: _is_answered(plane), "the container was started again")


def test_a_change_that_cannot_be_written_takes_no_room(tmp_path: Path) -> None:
    with control_plane(tmp_path, "--max-containers", "2") as plane:
        plane.model("echo")
        plane.config("echo", "echo")
        plane.config("other", "echo")
        plane.create("chat", "echo")
        plane.wait_in_service("chat")
        state = tmp_path / "control" / "state.json"
        kept = tmp_path / "kept.json"
        state.rename(kept)
        # No file takes the place of a folder.
        state.mkdir()
        sizes = [{"VariantName": "echo", "DesiredInstanceCount": 2}]
        changes: list[Callable[[], Any]] = [
            lambda: plane.create("second", "echo"),
            lambda: plane.control.update_endpoint(EndpointName="chat", EndpointConfigName="other"),
            lambda: plane.control.update_endpoint_weights_and_capacities(
                EndpointName="chat", DesiredWeightsAndCapacities=sizes
            ),
        ]
        for change in changes:
            with pytest.raises(ClientError, match="could not be written"):
                change()

        state.rmdir()
        kept.rename(state)
        plane.control.update_endpoint(EndpointName="chat", EndpointConfigName="other")
        plane.wait_in_service("chat")
        assert plane.describe("chat")["EndpointConfigName"] == "other"


def test_an_update_that_the_disk_cannot_keep_is_over_and_written_once_there_is_room(
    tmp_path: Path,
) -> None:
    with control_plane(tmp_path) as plane:
        plane.model("echo")
        plane.config("echo", "echo")
        plane.create("chat", "echo")
        plane.wait_in_service("chat")
        state = tmp_path / "control" / "state.json"
        kept = tmp_path / "kept.json"

        plane.control.update_endpoint(EndpointName="chat", EndpointConfigName="echo")
        state.rename(kept)
        # No file takes the place of a folder.
        state.mkdir()
        plane.wait_in_service("chat")
        assert plane.variant("chat") == "echo"
        assert json.loads(kept.read_bytes())["endpoints"]["chat"]["status"] == "Updating"

        state.rmdir()
        wait_until(state.exists, "the state is written")
        assert json.loads(state.read_bytes())["endpoints"]["chat"]["status"] == "InService"


def _is_answered(plane: ControlPlane) -> bool:
    try:
        return plane.variant("chat") == "echo"
    except ClientError:
        return False


def test_one_gateway_at_a_time_has_the_state(tmp_path: Path) -> None:
    with control_plane(tmp_path):
        done = lmi("gateway", "--port", "0", "--control-dir", str(tmp_path / "control"))

    assert done.returncode == 2 and "belongs to another gateway" in done.stderr


def test_state_that_cannot_be_read_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"models": [')
    done = lmi("gateway", "--port", "0", "--control-dir", str(tmp_path))

    assert done.returncode == 2 and str(tmp_path) in done.stderr
    assert (tmp_path / "state.json").read_text() == '{"models": ['


def test_without_signatures_other_machines_do_not_reach_the_control_plane(tmp_path: Path) -> None:
    done = lmi("gateway", "--port", "0", "--host", "0.0.0.0", "--control-dir", str(tmp_path))

    assert done.returncode == 2 and "needs --check-signatures" in done.stderr


def test_nothing_unsigned_reaches_the_control_plane_where_signatures_are_asked_for(
    tmp_path: Path,
) -> None:
    with control_plane(tmp_path, "--check-signatures", environ=CREDENTIALS) as plane:
        plane.model("echo")
        for path in ("/", "/inference-routers/any/invocations"):
            with closing(HTTPConnection("127.0.0.1", plane.aws.port, timeout=60)) as connection:
                headers = {"X-Amz-Target": "SageMaker.DeleteModel"}
                connection.request("POST", path, b'{"ModelName": "echo"}', headers)
                assert connection.getresponse().status == 403

        with closing(plane.aws.client("sagemaker-inference-router-runtime")) as runtime:
            with fails("ValidationException", 400):
                runtime.invoke_inference_router(
                    InferenceRouterName="any", RoutingTargetName="any", Body=b"{}"
                )

        assert plane.control.describe_model(ModelName="echo")["ModelName"] == "echo"


@pytest.mark.parametrize("flag", ["--endpoint", "--component", "--models"])
def test_a_gateway_either_has_endpoints_of_flags_or_lets_clients_create_them(
    flag: str, tmp_path: Path
) -> None:
    value = "http://127.0.0.1:1" if flag == "--endpoint" else "a" if flag == "--component" else "."
    done = lmi("gateway", "--port", "0", "--control-dir", str(tmp_path), flag, value)

    assert done.returncode == 2 and "--control-dir goes without" in done.stderr


def lmi(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {**ENVIRON, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "lmi", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def test_every_pattern_of_an_operation_is_one_that_python_reads() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")

    def patterns(shape: Any) -> Iterator[str]:
        if "pattern" in shape.metadata:
            yield shape.metadata["pattern"]

        parts = {
            "structure": lambda: shape.members.values(),
            "list": lambda: [shape.member],
            "map": lambda: [shape.key, shape.value],
        }
        for part in parts.get(shape.type_name, list)():
            yield from patterns(part)

    for operation in OPERATIONS:
        for pattern in set(patterns(model.operation_model(operation).input_shape)):
            assert compiled(pattern), pattern

    assert compiled(r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)").fullmatch("Grün 1²") is not None
    assert compiled(r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)").fullmatch("a\n") is None
