"""The plans: what each word of `scripts/sagemaker` does, as steps.

A model, the configuration of its endpoint and the endpoint have one name, so that one name takes
all of them down.
"""

import base64
import json
import re
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from scripts.sagemaker_kit import model
from scripts.sagemaker_kit.steps import Call, Command, Failed, Plan, Refused, Step, Wait

REPOSITORY = re.compile(
    r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([a-z0-9._/-]+)"
)
VARIANT = "AllTraffic"
# what SageMaker says of a name that it does not know
GONE = r"ValidationException: .*[Cc]ould not find"
UNDER_WAY = frozenset(
    {"Creating", "Updating", "SystemUpdating", "RollingBack"}
)  # of endpoints and components
DELETING = frozenset({"Deleting"})
JOB_UNDER_WAY = frozenset({"InProgress", "Stopping"})
LINES = "application/jsonlines"
LONGEST_S = 3600  # that SageMaker waits for one answer of a job
NUM_LOG_LINES = 20
NO_LOG = "ResourceNotFoundException"


def push(given: Namespace) -> Plan:
    """Create the repository if there is none, log docker in, tag and push. The tag is NAME."""
    match = REPOSITORY.fullmatch(given.repository)
    if match is None:
        raise Refused(
            f"--repository takes ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME, given "
            f"{given.repository}"
        )

    account, region, repository = match.groups()
    if given.region not in (None, region):
        raise Refused(f"--repository is in {region} and --region is {given.region}")

    target = f"{given.repository}:{given.name}"
    wanted = {"registryId": account, "repositoryName": repository}
    yield Call("ecr", "CreateRepository", wanted, "RepositoryAlreadyExistsException", region)
    password = _password((yield Call("ecr", "GetAuthorizationToken", {}, region=region)))
    registry = given.repository.partition("/")[0]
    yield Command(("docker", "login", "--username", "AWS", "--password-stdin", registry), password)
    yield Command(("docker", "tag", given.image, target))
    yield Command(("docker", "push", target))
    return [f"{target}\n".encode()]


def _password(answer: dict) -> str:
    """ECR's token is base64 of `AWS:PASSWORD`. In a dry run there is none."""
    tokens = [each["authorizationToken"] for each in answer.get("authorizationData", [])]
    return base64.b64decode(tokens[0]).decode().partition(":")[2] if tokens else ""


def deploy(given: Namespace) -> Plan:
    """Create model, configuration and endpoint, and the base component if one is named. Wait for
    each.
    """
    _check_flags(given)
    yield model.create(given, given.multi_model, bool(given.async_output))
    yield Call("sagemaker", "CreateEndpointConfig", _configuration(given))
    endpoint = {"EndpointName": given.name}
    yield Call("sagemaker", "CreateEndpoint", {**endpoint, "EndpointConfigName": given.name})
    described = yield Wait(
        Call("sagemaker", "DescribeEndpoint", endpoint), "EndpointStatus", UNDER_WAY
    )
    yield from _check_status(given.name, described, "EndpointStatus")
    if given.component:
        yield from _create_component(given.name, _base_component(given))

    return [f"{given.name} is InService\n".encode()]


def adapter(given: Namespace) -> Plan:
    """Create the inference component of a LoRA adapter, which works on the base
    component's copies.
    """
    if not given.artifact.endswith(".tar.gz"):
        raise Refused(f"--artifact takes s3://….tar.gz, given {given.artifact}")

    specification = {
        "BaseInferenceComponentName": given.base,
        "Container": {"ArtifactUrl": given.artifact},
    }
    component = {"InferenceComponentName": given.component, "EndpointName": given.name}
    yield from _create_component(given.name, component | {"Specification": specification})
    return [f"{given.component} is InService\n".encode()]


def teardown(given: Namespace) -> Plan:
    """Delete adapters, base components, endpoint, configuration and model, in this order. What is
    gone is skipped.
    """
    components = yield from _components(given.name)
    for name in components:
        component = {"InferenceComponentName": name}
        yield Call("sagemaker", "DeleteInferenceComponent", component, GONE)
        describe = Call("sagemaker", "DescribeInferenceComponent", component, GONE)
        yield Wait(describe, "InferenceComponentStatus", DELETING)

    endpoint = {"EndpointName": given.name}
    yield Call("sagemaker", "DeleteEndpoint", endpoint, GONE)
    yield Wait(Call("sagemaker", "DescribeEndpoint", endpoint, GONE), "EndpointStatus", DELETING)
    yield Call("sagemaker", "DeleteEndpointConfig", {"EndpointConfigName": given.name}, GONE)
    yield Call("sagemaker", "DeleteModel", {"ModelName": given.name}, GONE)
    return [f"{given.name} is deleted\n".encode()]


def _check_flags(given: Namespace) -> None:
    if given.component and (given.async_output or given.multi_model):
        raise Refused(
            "--component shares an endpoint among components, which --async and --multi-model do "
            "not take"
        )

    if given.async_output and given.multi_model:
        raise Refused("an endpoint is either --async or --multi-model")

    if given.component and given.memory_mb is None:
        raise Refused(
            "--component needs --memory-mb, the memory that SageMaker reserves for each copy"
        )


def _configuration(given: Namespace) -> dict[str, Any]:
    variant = {
        "VariantName": VARIANT,
        "InstanceType": model.instance_type(given),
        "InitialInstanceCount": given.count,
    }
    configuration: dict[str, Any] = {"EndpointConfigName": given.name}
    if given.component:
        configuration["ExecutionRoleArn"] = given.role
        configuration |= {"EnableNetworkIsolation": True} if given.network_isolation else {}
    else:
        variant |= {"ModelName": given.name, "InitialVariantWeight": 1.0, **_timeouts(given)}

    if not given.async_output and not given.multi_model:
        variant["RoutingConfig"] = {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}

    if given.async_output:
        configuration["AsyncInferenceConfig"] = {
            "OutputConfig": {"S3OutputPath": given.async_output}
        }

    return configuration | {"ProductionVariants": [variant]}


def _timeouts(given: Namespace) -> dict[str, int]:
    return {
        "ModelDataDownloadTimeoutInSeconds": given.download_timeout,
        "ContainerStartupHealthCheckTimeoutInSeconds": given.startup_timeout,
    }


def _base_component(given: Namespace) -> dict[str, Any]:
    needs = {"MinMemoryRequiredInMb": given.memory_mb}
    if given.gpus:
        needs["NumberOfAcceleratorDevicesRequired"] = given.gpus

    return {
        "InferenceComponentName": given.component,
        "EndpointName": given.name,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": given.name,
            "StartupParameters": _timeouts(given),
            "ComputeResourceRequirements": needs,
        },
        "RuntimeConfig": {"CopyCount": given.count},
    }


def _create_component(endpoint: str, parameters: dict[str, Any]) -> Generator[Step, Any, None]:
    yield Call("sagemaker", "CreateInferenceComponent", parameters)
    named = {"InferenceComponentName": parameters["InferenceComponentName"]}
    describe = Call("sagemaker", "DescribeInferenceComponent", named)
    described = yield Wait(describe, "InferenceComponentStatus", UNDER_WAY)
    yield from _check_status(endpoint, described, "InferenceComponentStatus")


def _check_status(
    endpoint: str, described: dict[str, Any], member: str
) -> Generator[Step, Any, None]:
    """Fail with SageMaker's reason and the container's last lines, unless the status is
    InService.
    """
    status = described.get(member, "InService")
    if status == "InService":
        return

    group = (
        f"/aws/sagemaker/{'Endpoints' if member == 'EndpointStatus' else 'InferenceComponents'}/"
    )
    name = endpoint if member == "EndpointStatus" else described["InferenceComponentName"]
    lines = yield from _last_lines(group + name)
    reason = described.get("FailureReason", "SageMaker names no reason")
    advice = f"scripts/sagemaker teardown {endpoint} deletes what was created"
    raise Failed("\n".join([f"{name} is {status}: {reason}", *lines, advice]))


def _components(endpoint: str) -> Generator[Step, Any, list[str]]:
    """The names of an endpoint's inference components, adapters before the components that they
    work on.
    """
    names: list[str] = []
    wanted = {"EndpointNameEquals": endpoint}
    while True:
        page = yield Call("sagemaker", "ListInferenceComponents", wanted, GONE)
        names += [
            each["InferenceComponentName"] for each in (page or {}).get("InferenceComponents", [])
        ]
        token = (page or {}).get("NextToken")
        if not token:
            break

        wanted = {"EndpointNameEquals": endpoint, "NextToken": token}

    adapters = []
    for name in names:
        found = yield Call(
            "sagemaker", "DescribeInferenceComponent", {"InferenceComponentName": name}, GONE
        )
        if "BaseInferenceComponentName" in (found or {}).get("Specification", {}):
            adapters.append(name)

    return adapters + [name for name in names if name not in adapters]


def transform(given: Namespace) -> Plan:
    """Create the model if --image is given, else use the one that NAME was deployed with. Run the
    job and wait.
    """
    if given.image:
        yield model.create(given)
    elif given.role or given.model or given.env or given.network_isolation:
        raise Refused(
            "--role, --model, --env and --network-isolation describe a new model, which needs "
            "--image"
        )

    job = f"{given.name[:47]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    yield Call("sagemaker", "CreateTransformJob", _job(given, job))
    describe = Call("sagemaker", "DescribeTransformJob", {"TransformJobName": job})
    described = yield Wait(describe, "TransformJobStatus", JOB_UNDER_WAY)
    status = described.get("TransformJobStatus", "Completed")
    if status != "Completed":
        lines = yield from _last_lines("/aws/sagemaker/TransformJobs", f"{job}/")
        raise Failed(
            "\n".join(
                [
                    f"{job} is {status}: {described.get('FailureReason', 'no reason is named')}",
                    *lines,
                ]
            )
        )

    return [f"{given.output.rstrip('/')}/\n".encode()]


def _job(given: Namespace, job: str) -> dict[str, Any]:
    """The container says by /execution-parameters how many requests it takes at once, so the job
    does not.
    """
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": given.input}}
    return {
        "TransformJobName": job,
        "ModelName": given.name,
        "ModelClientConfig": {"InvocationsTimeoutInSeconds": LONGEST_S},
        "TransformInput": {"DataSource": source, "ContentType": LINES, "SplitType": "Line"},
        "TransformOutput": {"S3OutputPath": given.output, "Accept": LINES, "AssembleWith": "Line"},
        "TransformResources": {
            "InstanceType": model.instance_type(given),
            "InstanceCount": given.count,
        },
    }


def invoke(given: Namespace) -> Plan:
    """Send one request, whole, streamed or asynchronous."""
    if given.is_async:
        answer = yield Call("sagemaker-runtime", "InvokeEndpointAsync", _asynchronous(given))
        places = {
            name: answer[name]
            for name in ("InferenceId", "OutputLocation", "FailureLocation")
            if name in answer
        }
        return [json.dumps(places).encode() + b"\n"]

    parameters = _common(given) | {"Body": _body(given.body)}
    if given.stream:
        answer = yield Call("sagemaker-runtime", "InvokeEndpointWithResponseStream", parameters)
        return _parts(answer)

    answer = yield Call("sagemaker-runtime", "InvokeEndpoint", parameters)
    return answer.get("Body", ())


def _common(given: Namespace) -> dict[str, Any]:
    if given.stream and (given.is_async or given.target_model):
        raise Refused("--stream goes neither with --async nor with --target-model")

    optional = {"TargetModel": given.target_model, "InferenceComponentName": given.component}
    named = {"EndpointName": given.name, "ContentType": given.content_type}
    return named | {name: value for name, value in optional.items() if value}


def _asynchronous(given: Namespace) -> dict[str, Any]:
    if given.target_model or given.component:
        raise Refused("--async goes neither with --target-model nor with --component")

    where = {"InputLocation": given.body} if "://" in given.body else {"Body": _body(given.body)}
    return _common(given) | where


def _body(path: str) -> bytes:
    if "://" in path:
        raise Refused(f"--body takes a file, and {path} only with --async")

    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Refused(f"--body {path}: {error.strerror}") from error


def _parts(answer: dict[str, Any]) -> Iterator[bytes]:
    """The bytes of each part as it comes. Parts begin and end anywhere, also inside a character."""
    for event in answer.get("Body", ()):
        yield event["PayloadPart"]["Bytes"]


def _last_lines(group: str, prefix: str = "") -> Generator[Step, Any, list[str]]:
    """Return the last lines of a container's log: of the newest stream of a group, or of that which
    begins so.
    """
    newest = (
        {"logStreamNamePrefix": prefix}
        if prefix
        else {"orderBy": "LastEventTime", "descending": True}
    )
    found = yield Call(
        "logs", "DescribeLogStreams", {"logGroupName": group, "limit": 1, **newest}, NO_LOG
    )
    streams = (found or {}).get("logStreams", [])
    if not streams:
        return [f"there is no log in {group}"]

    stream = {"logGroupName": group, "logStreamName": streams[0]["logStreamName"]}
    events = yield Call(
        "logs", "GetLogEvents", {**stream, "limit": NUM_LOG_LINES, "startFromHead": False}, NO_LOG
    )
    return [event["message"].rstrip() for event in (events or {}).get("events", [])]
