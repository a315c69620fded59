"""Scaling by the number of requests that an instance, or a copy of a component, has at once."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from scripts.sagemaker_kit.configuration import VARIANT
from scripts.sagemaker_kit.steps import Call, Refused

SERVICE = "application-autoscaling"
# What Application Auto Scaling says of a target that it does not know
NO_TARGET = r"ObjectNotFoundException"


def check(options: Namespace) -> None:
    if options.max_count is None:
        if options.min_count is not None:
            raise Refused("--min-count goes with --max-count, which switches scaling on")

        return

    lowest = _lowest(options)
    if lowest < 1 and not options.component:
        raise Refused(f"only a --component scales to none, given --min-count {lowest}")

    if not lowest <= options.count <= options.max_count:
        raise Refused(
            f"--count lies between --min-count and --max-count, given {options.count} "
            f"of {lowest} to {options.max_count}"
        )


def managed_instances(options: Namespace) -> dict[str, Any]:
    """Copies of a component need instances, whose number SageMaker then sets itself."""
    if not options.component or options.max_count is None:
        return {}

    return {
        "ManagedInstanceScaling": {
            "Status": "ENABLED",
            "MinInstanceCount": _lowest(options),
            "MaxInstanceCount": options.max_count,
        }
    }


def register(options: Namespace) -> Iterator[Call]:
    """The calls that let the number follow the requests. None without --max-count."""
    if options.max_count is None:
        return

    target = _target(options.name, options.component)
    limits = {"MinCapacity": _lowest(options), "MaxCapacity": options.max_count}
    yield Call(SERVICE, "RegisterScalableTarget", target | limits)

    metric = (
        "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
        if options.component
        else "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    )
    policy = {
        "PolicyName": f"{options.name}-concurrent-requests",
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": options.target_concurrency,
            "PredefinedMetricSpecification": {"PredefinedMetricType": metric},
        },
    }
    yield Call(SERVICE, "PutScalingPolicy", target | policy)


def deregister(endpoint: str, component: str | None = None) -> Call:
    """The call that ends scaling, and deletes its policy. A target that is gone is tolerated."""
    return Call(SERVICE, "DeregisterScalableTarget", _target(endpoint, component), NO_TARGET)


def _target(endpoint: str, component: str | None) -> dict[str, str]:
    if component:
        resource = f"inference-component/{component}"
        dimension = "sagemaker:inference-component:DesiredCopyCount"
    else:
        resource = f"endpoint/{endpoint}/variant/{VARIANT}"
        dimension = "sagemaker:variant:DesiredInstanceCount"

    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource,
        "ScalableDimension": dimension,
    }


def _lowest(options: Namespace) -> int:
    return 1 if options.min_count is None else int(options.min_count)
