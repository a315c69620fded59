"""The plans: what each word of `scripts/sagemaker` does, as steps.

A model, the configuration of its endpoint and the endpoint have one name, which an update lengthens
by its time, so that one name takes all of them down.
"""

import base64
import json
import re
from argparse import Namespace
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.sagemaker_kit import configuration, model, releases, scaling
from scripts.sagemaker_kit.configuration import VARIANT
from scripts.sagemaker_kit.releases import GONE, Release
from scripts.sagemaker_kit.steps import Call, Command, Failed, Plan, Refused, Step, Wait

REPOSITORY = re.compile(
    r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([a-z0-9._/-]+)"
)
# Of endpoints and components
UNDER_WAY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack"})
DELETING = frozenset({"Deleting"})
JOB_UNDER_WAY = frozenset({"InProgress", "Stopping"})
LINES = "application/jsonlines"
# That SageMaker waits for one answer of a job
LONGEST_S = 3600
NUM_LOG_LINES = 20
NO_LOG = "ResourceNotFoundException"


def push(options: Namespace) -> Plan:
    """Create the repository if there is none, log docker in, tag and push. The tag is NAME."""
    match = REPOSITORY.fullmatch(options.repository)
    if match is None:
        raise Refused(
            f"--repository takes ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME, given "
            f"{options.repository}"
        )

    account, region, repository = match.groups()
    if options.region not in (None, region):
        raise Refused(f"--repository is in {region} and --region is {options.region}")

    target = f"{options.repository}:{options.name}"
    repository_names = {"registryId": account, "repositoryName": repository}
    yield Call(
        "ecr", "CreateRepository", repository_names, "RepositoryAlreadyExistsException", region
    )
    password = _password((yield Call("ecr", "GetAuthorizationToken", {}, region=region)))
    registry = options.repository.partition("/")[0]
    yield Command(("docker", "login", "--username", "AWS", "--password-stdin", registry), password)
    yield Command(("docker", "tag", options.image, target))
    yield Command(("docker", "push", target))
    return [f"{target}\n".encode()]


def _password(answer: dict) -> str:
    """ECR's token is base64 of `AWS:PASSWORD`. In a dry run there is none."""
    tokens = [datum["authorizationToken"] for datum in answer.get("authorizationData", [])]
    return base64.b64decode(tokens[0]).decode().partition(":")[2] if tokens else ""


def deploy(options: Namespace) -> Plan:
    """Create model, configuration and endpoint, and the base component if one is named. Wait for
    each.
    """
    _check_flags(options)
    scaling.check(options)
    yield model.create(options, options.multi_model, bool(options.async_output))
    variants = configuration.create(options)
    variants["ProductionVariants"][0] |= scaling.managed_instances(options)
    yield Call("sagemaker", "CreateEndpointConfig", variants)
    endpoint = {"EndpointName": options.name}
    created = {**endpoint, "EndpointConfigName": options.name, **model.tags(options)}
    yield Call("sagemaker", "CreateEndpoint", created)
    described = yield Wait(
        Call("sagemaker", "DescribeEndpoint", endpoint), "EndpointStatus", UNDER_WAY
    )
    yield from _check_status(options.name, described, "EndpointStatus")
    if options.component:
        yield from _create_component(options.name, _base_component(options))

    yield from scaling.register(options)
    return [f"{options.name} is InService\n".encode()]


def update(options: Namespace) -> Plan:
    """Create a model, and put it in the place of that which an endpoint or a component serves. The
    former one is deleted, or the new one where SageMaker goes back.
    """
    _check_flags(options)
    deployment = releases.deployment(options)
    name = releases.timed_name(options.name)
    renamed = Namespace(**{**vars(options), "name": name})
    if options.component:
        yield from _update_component(renamed, options.name, deployment)
        return [f"{options.component} is updated\n".encode()]

    former = yield from releases.deployed(options.name)
    yield model.create(renamed, options.multi_model, bool(options.async_output))
    yield Call("sagemaker", "CreateEndpointConfig", configuration.create(renamed))
    changes = {"EndpointName": options.name, "EndpointConfigName": name, **deployment}
    if options.keep_count:
        changes["RetainAllVariantProperties"] = True
        changes["ExcludeRetainedVariantProperties"] = [{"VariantPropertyType": "DataCaptureConfig"}]

    yield Call("sagemaker", "UpdateEndpoint", changes)
    describe = Call("sagemaker", "DescribeEndpoint", {"EndpointName": options.name})
    described = yield Wait(describe, "EndpointStatus", UNDER_WAY)
    yield from _check_status(options.name, described, "EndpointStatus")
    if described.get("EndpointConfigName", name) != name:
        yield from releases.delete(Release(name, (name,)))
        reason = described.get("FailureReason", "SageMaker names no reason")
        raise Failed(f"{options.name} went back to what it served before: {reason}")

    yield from releases.delete(former)
    return [f"{options.name} is updated\n".encode()]


def _update_component(
    renamed: Namespace, endpoint: str, deployment: dict[str, Any]
) -> Generator[Step, Any, None]:
    """Update a base component to the model of `renamed`, which has the new model's name."""
    component = {"InferenceComponentName": renamed.component}
    describe = Call("sagemaker", "DescribeInferenceComponent", component)
    former = _model_of((yield describe)) or endpoint
    yield model.create(renamed)
    base = _base_component(renamed)
    changes = {**component, "Specification": base["Specification"], **deployment}
    if not renamed.keep_count:
        changes["RuntimeConfig"] = base["RuntimeConfig"]

    yield Call("sagemaker", "UpdateInferenceComponent", changes)
    described = yield Wait(describe, "InferenceComponentStatus", UNDER_WAY)
    yield from _check_status(endpoint, described, "InferenceComponentStatus")
    if described and _model_of(described) != renamed.name:
        yield releases.delete_model(renamed.name)
        reason = described.get("FailureReason", "SageMaker names no reason")
        raise Failed(f"{renamed.component} went back to what it served before: {reason}")

    if releases.is_of(former, endpoint):
        yield releases.delete_model(former)


def adapter(options: Namespace) -> Plan:
    """Create the inference component of a LoRA adapter, which works on the base
    component's copies.
    """
    if not options.artifact.endswith(".tar.gz"):
        raise Refused(f"--artifact takes s3://….tar.gz, given {options.artifact}")

    specification = {
        "BaseInferenceComponentName": options.base,
        "Container": {"ArtifactUrl": options.artifact},
    }
    component = {"InferenceComponentName": options.component, "EndpointName": options.name}
    yield from _create_component(options.name, component | {"Specification": specification})
    return [f"{options.component} is InService\n".encode()]


def teardown(options: Namespace) -> Plan:
    """Delete adapters, base components, endpoint, configuration and models, in this order. What is
    gone is skipped.
    """
    components = yield from _components(options.name)
    if options.scaled:
        yield scaling.deregister(options.name)

    for name in components:
        if options.scaled:
            yield scaling.deregister(options.name, name)

        component = {"InferenceComponentName": name}
        yield Call("sagemaker", "DeleteInferenceComponent", component, GONE)
        describe = Call("sagemaker", "DescribeInferenceComponent", component, GONE)
        yield Wait(describe, "InferenceComponentStatus", DELETING)

    release = yield from releases.deployed(options.name, GONE)
    for name in filter(None, components.values()):
        if releases.is_of(name, options.name) and name not in release.models:
            release = replace(release, models=(*release.models, name))

    endpoint = {"EndpointName": options.name}
    yield Call("sagemaker", "DeleteEndpoint", endpoint, GONE)
    yield Wait(Call("sagemaker", "DescribeEndpoint", endpoint, GONE), "EndpointStatus", DELETING)
    yield from releases.delete(release)
    return [f"{options.name} is deleted\n".encode()]


def _check_flags(options: Namespace) -> None:
    if options.component and (options.async_output or options.multi_model):
        raise Refused(
            "--component shares an endpoint among components, which --async and --multi-model do "
            "not take"
        )

    if options.async_output and options.multi_model:
        raise Refused("an endpoint is either --async or --multi-model")

    if options.component and options.memory_mb is None:
        raise Refused(
            "--component needs --memory-mb, the memory that SageMaker reserves for each copy"
        )


def _base_component(options: Namespace) -> dict[str, Any]:
    needs = {"MinMemoryRequiredInMb": options.memory_mb}
    if options.gpus:
        needs["NumberOfAcceleratorDevicesRequired"] = options.gpus

    return {
        "InferenceComponentName": options.component,
        "EndpointName": options.name,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": options.name,
            "StartupParameters": configuration.timeouts(options),
            "ComputeResourceRequirements": needs,
        },
        "RuntimeConfig": {"CopyCount": options.count},
        **model.tags(options),
    }


def _create_component(endpoint: str, parameters: dict[str, Any]) -> Generator[Step, Any, None]:
    yield Call("sagemaker", "CreateInferenceComponent", parameters)
    component_name = {"InferenceComponentName": parameters["InferenceComponentName"]}
    describe = Call("sagemaker", "DescribeInferenceComponent", component_name)
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


def _components(endpoint: str) -> Generator[Step, Any, dict[str, str]]:
    """The models of an endpoint's inference components by their names: first adapters, which have
    none, then the components that they work on. A component may have none either.
    """
    names: list[str] = []
    filters = {"EndpointNameEquals": endpoint}
    while True:
        page = yield Call("sagemaker", "ListInferenceComponents", filters, GONE)
        names += [
            component["InferenceComponentName"]
            for component in (page or {}).get("InferenceComponents", [])
        ]
        token = (page or {}).get("NextToken")
        if not token:
            break

        filters = {"EndpointNameEquals": endpoint, "NextToken": token}

    adapters = {}
    bases = {}
    for name in names:
        component = {"InferenceComponentName": name}
        description = yield Call("sagemaker", "DescribeInferenceComponent", component, GONE)
        description = description or {}
        is_adapter = "BaseInferenceComponentName" in description.get("Specification", {})
        models = adapters if is_adapter else bases
        models[name] = _model_of(description)

    return adapters | bases


def _model_of(component: dict[str, Any]) -> str:
    """The model of a described component, or "" if it names none."""
    name: str = component.get("Specification", {}).get("ModelName", "")
    return name


def transform(options: Namespace) -> Plan:
    """Create the model if --image is given, else use the one that NAME was deployed with. Run the
    job and wait.
    """
    if options.image:
        yield model.create(options)
    elif options.role or options.model or options.env or options.network_isolation:
        raise Refused(
            "--role, --model, --env and --network-isolation describe a new model, which needs "
            "--image"
        )

    job = releases.timed_name(options.name)
    yield Call("sagemaker", "CreateTransformJob", _job(options, job))
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

    return [f"{options.output.rstrip('/')}/\n".encode()]


def _job(options: Namespace, job: str) -> dict[str, Any]:
    """The container says by /execution-parameters how many requests it takes at once, so the job
    does not.
    """
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": options.input}}
    return {
        "TransformJobName": job,
        "ModelName": options.name,
        "ModelClientConfig": {"InvocationsTimeoutInSeconds": LONGEST_S},
        "TransformInput": {"DataSource": source, "ContentType": LINES, "SplitType": "Line"},
        "TransformOutput": {
            "S3OutputPath": options.output,
            "Accept": LINES,
            "AssembleWith": "Line",
        },
        "TransformResources": {
            "InstanceType": model.instance_type(options),
            "InstanceCount": options.count,
        },
    }


def invoke(options: Namespace) -> Plan:
    """Send one request, whole, streamed or asynchronous."""
    if options.is_async:
        answer = yield Call("sagemaker-runtime", "InvokeEndpointAsync", _asynchronous(options))
        places = {
            name: answer[name]
            for name in ("InferenceId", "OutputLocation", "FailureLocation")
            if name in answer
        }
        return [json.dumps(places).encode() + b"\n"]

    parameters = _common(options) | {"Body": _body(options.body)}
    if options.stream:
        answer = yield Call("sagemaker-runtime", "InvokeEndpointWithResponseStream", parameters)
        return _parts(answer)

    answer = yield Call("sagemaker-runtime", "InvokeEndpoint", parameters)
    return answer.get("Body", ())


def _common(options: Namespace) -> dict[str, Any]:
    if options.stream and (options.is_async or options.target_model):
        raise Refused("--stream goes neither with --async nor with --target-model")

    optional = {"TargetModel": options.target_model, "InferenceComponentName": options.component}
    common = {"EndpointName": options.name, "ContentType": options.content_type}
    return common | {name: value for name, value in optional.items() if value}


def _asynchronous(options: Namespace) -> dict[str, Any]:
    if options.target_model or options.component:
        raise Refused("--async goes neither with --target-model nor with --component")

    where = (
        {"InputLocation": options.body} if "://" in options.body else {"Body": _body(options.body)}
    )
    return _common(options) | where


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
    page = yield Call(
        "logs", "DescribeLogStreams", {"logGroupName": group, "limit": 1, **newest}, NO_LOG
    )
    streams = (page or {}).get("logStreams", [])
    if not streams:
        return [f"there is no log in {group}"]

    stream = {"logGroupName": group, "logStreamName": streams[0]["logStreamName"]}
    events = yield Call(
        "logs", "GetLogEvents", {**stream, "limit": NUM_LOG_LINES, "startFromHead": False}, NO_LOG
    )
    return [event["message"].rstrip() for event in (events or {}).get("events", [])]
