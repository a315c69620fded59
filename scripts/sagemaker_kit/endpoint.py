"""Plans that create an endpoint, give it an adapter, and take it down.

The model, the endpoint's configuration and the endpoint have one name, so that one name takes all of them down.
"""

from argparse import Namespace
from collections.abc import Generator
from typing import Any

from scripts.sagemaker_kit import model
from scripts.sagemaker_kit.log_tail import last_lines
from scripts.sagemaker_kit.steps import Call, Failed, Plan, Refused, Step, Wait

VARIANT = "AllTraffic"
GONE = r"ValidationException: .*[Cc]ould not find"  # what SageMaker says of a name that it does not know
UNDER_WAY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack"})
DELETING = frozenset({"Deleting"})


def deploy(given: Namespace) -> Plan:
    """Create model, configuration and endpoint, and the base component if one is named. Wait for each."""
    _check(given)
    yield model.create(given, given.multi_model, bool(given.async_output))
    yield Call("sagemaker", "CreateEndpointConfig", _configuration(given))
    endpoint = {"EndpointName": given.name}
    yield Call("sagemaker", "CreateEndpoint", {**endpoint, "EndpointConfigName": given.name})
    described = yield Wait(Call("sagemaker", "DescribeEndpoint", endpoint), "EndpointStatus", UNDER_WAY)
    yield from _check_status(given.name, described, "EndpointStatus")
    if given.component:
        yield from _create_component(given.name, _base_component(given))
    return [f"{given.name} is InService\n".encode()]


def adapter(given: Namespace) -> Plan:
    """Create the inference component of a LoRA adapter, which works on the base component's copies."""
    if not given.artifact.endswith(".tar.gz"):
        raise Refused(f"--artifact takes s3://….tar.gz, given {given.artifact}")
    specification = {"BaseInferenceComponentName": given.base, "Container": {"ArtifactUrl": given.artifact}}
    component = {"InferenceComponentName": given.component, "EndpointName": given.name}
    yield from _create_component(given.name, component | {"Specification": specification})
    return [f"{given.component} is InService\n".encode()]


def teardown(given: Namespace) -> Plan:
    """Delete adapters, base components, endpoint, configuration and model, in this order. What is gone is skipped."""
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


def _check(given: Namespace) -> None:
    if given.component and (given.async_output or given.multi_model):
        raise Refused("--component shares an endpoint among components, which --async and --multi-model do not take")
    if given.async_output and given.multi_model:
        raise Refused("an endpoint is either --async or --multi-model")
    if given.component and given.memory_mb is None:
        raise Refused("--component needs --memory-mb, the memory that SageMaker reserves for each copy")


def _configuration(given: Namespace) -> dict[str, Any]:
    variant = {"VariantName": VARIANT, "InstanceType": model.instance_type(given), "InitialInstanceCount": given.count}
    configuration: dict[str, Any] = {"EndpointConfigName": given.name}
    if given.component:
        configuration["ExecutionRoleArn"] = given.role
        configuration |= {"EnableNetworkIsolation": True} if given.network_isolation else {}
    else:
        variant |= {"ModelName": given.name, "InitialVariantWeight": 1.0, **_timeouts(given)}
    if not given.async_output and not given.multi_model:
        variant["RoutingConfig"] = {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    if given.async_output:
        configuration["AsyncInferenceConfig"] = {"OutputConfig": {"S3OutputPath": given.async_output}}
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


def _check_status(endpoint: str, described: dict[str, Any], member: str) -> Generator[Step, Any, None]:
    """Fail with SageMaker's reason and the container's last lines, unless the status is InService."""
    status = described.get(member, "InService")
    if status == "InService":
        return
    group = f"/aws/sagemaker/{'Endpoints' if member == 'EndpointStatus' else 'InferenceComponents'}/"
    name = endpoint if member == "EndpointStatus" else described["InferenceComponentName"]
    lines = yield from last_lines(group + name)
    reason = described.get("FailureReason", "SageMaker names no reason")
    advice = f"scripts/sagemaker teardown {endpoint} deletes what was created"
    raise Failed("\n".join([f"{name} is {status}: {reason}", *lines, advice]))


def _components(endpoint: str) -> Generator[Step, Any, list[str]]:
    """The names of an endpoint's inference components, adapters before the components that they work on."""
    names: list[str] = []
    wanted = {"EndpointNameEquals": endpoint}
    while True:
        page = yield Call("sagemaker", "ListInferenceComponents", wanted, GONE)
        names += [each["InferenceComponentName"] for each in (page or {}).get("InferenceComponents", [])]
        token = (page or {}).get("NextToken")
        if not token:
            break
        wanted = {"EndpointNameEquals": endpoint, "NextToken": token}
    adapters = []
    for name in names:
        found = yield Call("sagemaker", "DescribeInferenceComponent", {"InferenceComponentName": name}, GONE)
        if "BaseInferenceComponentName" in (found or {}).get("Specification", {}):
            adapters.append(name)
    return adapters + [name for name in names if name not in adapters]
