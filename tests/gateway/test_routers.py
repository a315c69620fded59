"""Inference routers, asked by AWS's own clients: from create to delete, and what they invoke."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from lmi.shared.processes import descendants
from tests.gateway.control_planes import BODY, ROLE, ControlPlane, control_plane
from tests.gateway.gateways import REGION, Gateway
from tests.gateway.test_gateway import fails
from tests.system.container import wait_until

RUNTIME = "sagemaker-inference-router-runtime"
HOME = f"arn:aws:sagemaker:{REGION}:000000000000:endpoint/home"
WEST = "arn:aws:sagemaker:us-west-2:000000000000:endpoint/west"
FAR = "arn:aws:sagemaker:ap-south-1:000000000000:endpoint/far"
COPY = f"arn:aws:sagemaker:{REGION}:000000000000:inference-component/copy"
NO_COPY = f"arn:aws:sagemaker:{REGION}:000000000000:inference-component/no-copy"
MISSING = f"arn:aws:sagemaker:{REGION}:000000000000:endpoint/missing"
FOREIGN = f"arn:aws:sagemaker:{REGION}:123456789012:endpoint/home"
REGIONS = {"home": REGION, "west": "us-west-2", "far": "ap-south-1"}
TIMEOUT_S = 6
MAX_BODY_BYTES = 6291456
NUM_HOSTILE_REQUESTS = 200
NEEDS = {"MinMemoryRequiredInMb": 1024}


def target(name: str, *arns: str, **members: Any) -> dict[str, Any]:
    return {"Name": name, "Destinations": [{"ResourceArn": arn} for arn in arns], **members}


def describe(aws: Gateway, name: str) -> dict[str, Any]:
    description: dict[str, Any] = aws.control.describe_inference_router(InferenceRouterName=name)
    return description


def wait_in_service(aws: Gateway, name: str) -> None:
    wait_until(lambda: describe(aws, name)["Status"] == "InService", f"{name} is in service")


def create(aws: Gateway, name: str, *targets: dict[str, Any], **members: Any) -> str:
    """Create a router and wait until it serves. Return its ARN."""
    answer = aws.control.create_inference_router(
        InferenceRouterName=name, RoutingTargets=list(targets), **members
    )
    wait_in_service(aws, name)
    arn: str = answer["InferenceRouterArn"]
    return arn


def statuses(aws: Gateway, name: str) -> dict[str, str]:
    """Return the status of each destination of a router's only target."""
    [described] = describe(aws, name)["RoutingTargets"]
    return {place["ResourceArn"]: place["RoutingStatus"] for place in described["Destinations"]}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Endpoints in three regions, and components on a fourth endpoint."""
    folder = tmp_path_factory.mktemp("plane")
    with control_plane(folder, "--timeout", str(TIMEOUT_S)) as running:
        running.model("echo")
        running.config("echo", "echo")
        for name, region in REGIONS.items():
            control = running.aws.client("sagemaker", region)
            control.create_endpoint(EndpointName=name, EndpointConfigName="echo")

        create_components(running)
        for name in REGIONS:
            running.wait_in_service(name)

        every = target("every", HOME, WEST, FAR)
        abroad = target("abroad", WEST, FAR, MISSING)
        create(
            running.aws,
            "llm",
            every,
            abroad,
            target("one", MISSING, WEST),
            target("none", MISSING),
            target("copy", COPY),
            target("no-copy", NO_COPY),
        )
        yield running


def create_components(plane: ControlPlane) -> None:
    """A component with a copy, and one that has none because its model cannot be served."""
    variant = {"VariantName": "all", "InstanceType": "ml.g6.2xlarge", "InitialInstanceCount": 1}
    plane.control.create_endpoint_config(
        EndpointConfigName="shared", ExecutionRoleArn=ROLE, ProductionVariants=[variant]
    )
    plane.create("shared", "shared")
    plane.wait_in_service("shared")
    plane.model("broken", "broken")
    for name, model in (("copy", "echo"), ("no-copy", "broken")):
        plane.control.create_inference_component(
            InferenceComponentName=name,
            EndpointName="shared",
            VariantName="all",
            Specification={"ModelName": model, "ComputeResourceRequirements": NEEDS},
            RuntimeConfig={"CopyCount": 1},
        )

    def status() -> str:
        description = plane.control.describe_inference_component(InferenceComponentName="copy")
        text: str = description["InferenceComponentStatus"]
        return text

    wait_until(lambda: status() == "InService", "the copy serves")


@pytest.fixture(scope="module")
def runtime(plane: ControlPlane) -> Iterator[Any]:
    with closing(plane.aws.client(RUNTIME)) as client:
        yield client


def invoke(runtime: Any, name: str, body: bytes = BODY, **members: str) -> Any:
    return runtime.invoke_inference_router(
        InferenceRouterName="llm", RoutingTargetName=name, Body=body, **members
    )


def reason(runtime: Any, name: str) -> tuple[str, str]:
    """Return who has answered, and the reason."""
    answer = invoke(runtime, name)
    assert json.loads(answer["Body"].read()) == {"generated_text": "hello"}
    return answer["InvokedRoutedResourceArn"], answer["RoutingReason"]


def test_a_router_is_created_described_updated_listed_and_deleted(plane: ControlPlane) -> None:
    aws = plane.aws
    control = plane.control
    first = {
        "InferenceRouterName": "life",
        "RoutingTargets": [target("a", HOME, MISSING, FOREIGN)],
        "ClientToken": "token-1",
        "Tags": [{"Key": "team", "Value": "a"}],
    }
    arn = control.create_inference_router(**first)["InferenceRouterArn"]
    assert arn == f"arn:aws:sagemaker:{REGION}:000000000000:inference-router/life"
    assert describe(aws, "life")["Status"] == "Creating"
    for change in (
        lambda: control.delete_inference_router(InferenceRouterName="life"),
        lambda: control.update_inference_router(
            InferenceRouterName="life", RoutingTargets=[target("b", WEST)]
        ),
    ):
        with fails("ConflictException", 400):
            change()

    # The same token brings the same router, and no other.
    assert control.create_inference_router(**first)["InferenceRouterArn"] == arn
    with fails("ConflictException", 400):
        control.create_inference_router(**{**first, "RoutingTargets": [target("b", WEST)]})

    with fails("ResourceAlreadyExists", 400):
        control.create_inference_router(**{**first, "ClientToken": "token-2"})

    wait_in_service(aws, "life")
    assert statuses(aws, "life") == {HOME: "Routable", MISSING: "Unroutable", FOREIGN: "Unknown"}
    assert control.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "team", "Value": "a"}]

    # What was described can be sent back, and replaces all targets once it is in service.
    targets = [*describe(aws, "life")["RoutingTargets"], target("b", WEST)]
    control.update_inference_router(InferenceRouterName="life", RoutingTargets=targets)
    description = describe(aws, "life")
    assert description["Status"] == "Updating"
    assert [entry["Name"] for entry in description["RoutingTargets"]] == ["a"]
    wait_in_service(aws, "life")
    assert [entry["Name"] for entry in describe(aws, "life")["RoutingTargets"]] == ["a", "b"]

    pages = control.get_paginator("list_inference_routers").paginate(
        PaginationConfig={"PageSize": 1}
    )
    listed = [router for page in pages for router in page["InferenceRouters"]]
    assert {router["InferenceRouterName"] for router in listed} == {"life", "llm"}

    control.delete_inference_router(InferenceRouterName="life")
    assert describe(aws, "life")["Status"] == "Deleting"

    def is_gone() -> bool:
        routers = control.list_inference_routers()["InferenceRouters"]
        return "life" not in [router["InferenceRouterName"] for router in routers]

    wait_until(is_gone, "the router is deleted")
    with fails("ResourceNotFound", 400):
        describe(aws, "life")


@pytest.mark.parametrize(
    ("targets", "rule"),
    [
        ([target("a", HOME), target("a", WEST)], "must be unique"),
        ([target("a", HOME, HOME)], "must be once"),
        ([target("a", HOME.replace("arn:aws:", "arn:aws-cn:"))], "in the partition of its router"),
        ([target("a", "arn:aws:sagemaker:eu:000000000000:model/m")], "regular expression"),
        ([target("a", *(f"{HOME}{n}" for n in range(11)))], "less than or equal to 10"),
        ([target(f"t{n}", HOME) for n in range(21)], "less than or equal to 20"),
        (
            [target("a", HOME, RoutingPreference="InstancePoolOrder")],
            "asynchronous routing targets",
        ),
        (
            [
                target(
                    "a",
                    HOME,
                    AsyncInferenceConfig={
                        "OutputConfig": {"S3OutputPath": "s3://x/a", "S3FailurePath": "s3://x/b"}
                    },
                )
            ],
            "--async-bucket allows",
        ),
    ],
)
def test_targets_that_cannot_be_served_are_refused(
    plane: ControlPlane, targets: list[dict[str, Any]], rule: str
) -> None:
    for call in (plane.control.create_inference_router, plane.control.update_inference_router):
        with fails("ValidationException", 400) as error:
            call(InferenceRouterName="llm", RoutingTargets=targets)

        assert rule in error["Error"]["Message"]


def test_a_request_goes_to_the_region_of_the_router_first_and_says_why(
    plane: ControlPlane, runtime: Any
) -> None:
    assert {reason(runtime, "every") for _ in range(10)} == {(HOME, "local-preferred")}
    shares = Counter(reason(runtime, "abroad") for _ in range(30))
    assert set(shares) == {(WEST, "capacity-available"), (FAR, "capacity-available")}
    assert reason(runtime, "one") == (WEST, "only-healthy")
    assert reason(runtime, "copy") == (COPY, "local-preferred")

    answer = invoke(
        runtime, "every", CustomAttributes="mine", InferenceId="routed 1", PrefixAwareId="team"
    )
    assert answer["InvokedProductionVariant"] == "echo"
    assert answer["CustomAttributes"] == "mine"
    logs = plane.folder / "control" / "logs" / "home"
    wait_until(
        lambda: any("routed 1" in file.read_text() for file in logs.iterdir()),
        "the container has its id",
    )


def test_a_destination_that_refuses_is_followed_by_another(
    plane: ControlPlane, runtime: Any
) -> None:
    body = json.dumps(
        {"inputs": "word " * 900, "parameters": {"max_new_tokens": 900}, "stream": True}
    )
    opened = plane.aws.stream(body.encode(), "home")
    with closing(opened["Body"]) as events:
        next(iter(events))
        # It refuses, and then listens no more, until the open request has its answer.
        os.kill(container_of(plane, "home"), signal.SIGTERM)
        wait_until(lambda: reason(runtime, "every")[1] == "failover", "a request goes elsewhere")
        arns = {reason(runtime, "every") for _ in range(3)}

    assert arns <= {(WEST, "failover"), (FAR, "failover")}
    assert plane.aws.says(f"{HOME} has refused a request of a router")
    # Started again, it is preferred again.
    wait_until(lambda: reason(runtime, "every") == (HOME, "local-preferred"), "home is back")


def container_of(plane: ControlPlane, endpoint: str) -> int:
    """Return the process of an endpoint's container."""
    folder = plane.folder / "control" / "logs" / endpoint
    for pid in descendants(plane.aws.process.pid):
        if Path(f"/proc/{pid}/cwd").resolve() == folder:
            return pid

    raise AssertionError(f"{endpoint} has no process")


def test_a_model_that_answers_late_or_with_an_error_is_not_followed_by_another(
    runtime: Any,
) -> None:
    slow = json.dumps({"inputs": "word " * 900, "parameters": {"max_new_tokens": 900}}).encode()
    with fails("ModelError", 424) as error:
        invoke(runtime, "every", slow)

    assert "timed out" in error["OriginalMessage"]
    with fails("ModelError", 424) as error:
        invoke(runtime, "every", b'{"inputs": 1}')

    assert error["OriginalStatusCode"] == 424
    assert error["LogStreamArn"].endswith("/aws/sagemaker/Endpoints/home")


def test_each_refusal_has_its_class_and_status(plane: ControlPlane, runtime: Any) -> None:
    with fails("ServiceUnavailableException", 503):
        invoke(runtime, "none")

    with fails("ModelNotReadyException", 429):
        invoke(runtime, "no-copy")

    with fails("ValidationException", 413) as error:
        invoke(runtime, "every", b"x" * (MAX_BODY_BYTES + 1))

    assert str(MAX_BODY_BYTES) in error["Error"]["Message"]
    with fails("ValidationException", 400) as error:
        invoke(runtime, "every", b"")

    with fails("ValidationException", 400) as error:
        invoke(runtime, "other")

    assert "Routing target other of inference router llm not found" in error["Error"]["Message"]
    with fails("ValidationException", 400):
        invoke(runtime, "every", PrefixAwareId="x" * 65)

    with fails("ValidationException", 400):
        runtime.invoke_inference_router(
            InferenceRouterName="other", RoutingTargetName="every", Body=BODY
        )

    with fails("ValidationException", 400) as error:
        runtime.invoke_inference_router_async(
            InferenceRouterName="llm", RoutingTargetName="every", InputLocation="s3://a/b"
        )

    assert "is not configured for async inference" in error["Error"]["Message"]


def request(plane: ControlPlane, path: str, headers: dict[str, str], body: bytes) -> Any:
    """Return the status of a request as it is, and its answer."""
    with closing(HTTPConnection("127.0.0.1", plane.aws.port, timeout=60)) as connection:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_hostile_names_and_headers_are_refused(plane: ControlPlane, runtime: Any) -> None:
    chance = random.Random(47)
    names = [
        "llm",
        "..%2fllm",
        "%00",
        "llm%0a",
        "a" * 64,
        "-",
        "%ff",
        "llm%2fx",
        "ｌ".encode().hex(),
    ]
    values = ["", "every ", "../every", "e" * 64, "\xff", "every\x7f", "-", "${every}", "a,b"]
    for _ in range(NUM_HOSTILE_REQUESTS):
        path = (
            f"/inference-routers/{chance.choice(names)}/{chance.choice(['', 'async-'])}invocations"
        )
        headers = {"X-Amzn-SageMaker-Routing-Target-Name": chance.choice(values)}
        status, answer = request(plane, path, headers, chance.randbytes(chance.randrange(40)))
        assert status in (400, 404) and answer.keys() == {"Message"}, (path, headers)

    status, answer = request(plane, "/inference-routers/llm/invocations", {}, BODY)
    assert status == 400 and "'routingTargetName'" in answer["Message"]
    assert reason(runtime, "copy") == (COPY, "local-preferred")


def asynchronous(name: str, *arns: str, **members: Any) -> dict[str, Any]:
    places = {"S3OutputPath": "s3://answers/good/", "S3FailurePath": "s3://answers/bad/"}
    return target(name, *arns, AsyncInferenceConfig={"OutputConfig": places}, **members)


def test_an_asynchronous_router_loses_nothing_when_the_gateway_is_killed(tmp_path: Path) -> None:
    later = f"arn:aws:sagemaker:{REGION}:000000000000:endpoint/later"
    answers = tmp_path / "answers"
    answers.mkdir()
    body = tmp_path / "body.json"
    body.write_bytes(BODY)
    flags = ["--async-bucket", f"answers={answers}", "--async-input", str(tmp_path)]

    def accept(aws: Gateway, location: str) -> Any:
        with closing(aws.client(RUNTIME)) as runtime:
            return runtime.invoke_inference_router_async(
                InferenceRouterName="jobs", RoutingTargetName="llm", InputLocation=location
            )

    def file_of(location: str) -> Path:
        return answers / location.removeprefix("s3://answers/")

    with control_plane(tmp_path, *flags) as plane:
        plane.model("echo")
        pools = [
            {"InstanceType": "ml.g6.2xlarge", "Priority": 1},
            {"InstanceType": "ml.g5.2xlarge", "Priority": 2},
        ]
        variant = {"VariantName": "echo", "ModelName": "echo", "InstancePools": pools}
        plane.control.create_endpoint_config(
            EndpointConfigName="later",
            ProductionVariants=[variant],
            AsyncInferenceConfig={"OutputConfig": {}},
        )
        plane.create("later", "later")
        plane.wait_in_service("later")
        for wrong in (target("llm", later), asynchronous("llm", later, COPY)):
            with fails("ValidationException", 400):
                create(plane.aws, "jobs", wrong)

        jobs = asynchronous("llm", MISSING, later, RoutingPreference="InstancePoolOrder")
        create(plane.aws, "jobs", jobs)
        with closing(plane.aws.client(RUNTIME)) as runtime, fails("ValidationException", 400):
            runtime.invoke_inference_router(
                InferenceRouterName="jobs", RoutingTargetName="llm", Body=BODY
            )

        good = accept(plane.aws, body.as_uri())
        bad = accept(plane.aws, (tmp_path / "none.json").as_uri())
        with fails("ValidationException", 400):
            accept(plane.aws, "file:///etc/passwd")

        wait_until(file_of(good["OutputLocation"]).exists, "the answer is there")
        assert json.loads(file_of(good["OutputLocation"]).read_bytes())["generated_text"] == "hello"
        wait_until(file_of(bad["FailureLocation"]).exists, "the failure is there")

        accepted = [accept(plane.aws, body.as_uri()) for _ in range(10)]
        plane.control.update_inference_router(
            InferenceRouterName="jobs", RoutingTargets=[asynchronous("llm", later)]
        )
        plane.control.create_inference_router(
            InferenceRouterName="second", RoutingTargets=[target("a", HOME)]
        )
        os.kill(plane.aws.process.pid, signal.SIGKILL)

    with control_plane(tmp_path, *flags) as plane:
        files = [file_of(answer["OutputLocation"]) for answer in accepted]
        wait_until(lambda: all(file.exists() for file in files), "each has its answer")
        for name in ("jobs", "second"):
            wait_in_service(plane.aws, name)

        assert statuses(plane.aws, "jobs") == {later: "Routable"}

    assert len(list((answers / "good").iterdir())) == 11
    assert len(list((answers / "bad").iterdir())) == 1
