"""A release: what an endpoint serves now, and how an update puts another in its place.

The first release has the name of its endpoint, and each update adds the time to it.
"""

import re
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from scripts.sagemaker_kit.steps import Call, Refused, Step

# What SageMaker says of a name that it does not know
GONE = r"ValidationException: .*[Cc]ould not find"
# Names have 63 characters at most, and the time has 16 of them
MAX_STEM_CHARS = 47
# SageMaker's limits of the instances that a rolling update replaces at a time
PERCENTS = range(5, 51)


@dataclass(frozen=True)
class Release:
    """An endpoint's configuration, and the models that its variants name."""

    configuration: str
    models: tuple[str, ...]


def timed_name(endpoint: str) -> str:
    return f"{endpoint[:MAX_STEM_CHARS]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def deployed(endpoint: str, tolerated: str = "") -> Generator[Step, Any, Release]:
    """Return what an endpoint serves, as far as it has names that were given here. What is gone,
    where that is tolerated, and what a rehearsal does not know, has the endpoint's own name.
    """
    described = yield Call("sagemaker", "DescribeEndpoint", {"EndpointName": endpoint}, tolerated)
    configuration = (described or {}).get("EndpointConfigName", endpoint)
    if not is_of(configuration, endpoint):
        return Release(endpoint, (endpoint,))

    parameters = {"EndpointConfigName": configuration}
    details = yield Call("sagemaker", "DescribeEndpointConfig", parameters, GONE)
    variants = (details or {}).get("ProductionVariants", [])
    models = [variant["ModelName"] for variant in variants if "ModelName" in variant]
    ours = tuple(name for name in models if is_of(name, endpoint))
    return Release(configuration, ours or (endpoint,))


def delete(release: Release) -> Iterator[Call]:
    configuration = {"EndpointConfigName": release.configuration}
    yield Call("sagemaker", "DeleteEndpointConfig", configuration, GONE)
    for name in release.models:
        yield delete_model(name)


def delete_model(name: str) -> Call:
    return Call("sagemaker", "DeleteModel", {"ModelName": name}, GONE)


def deployment(options: Namespace) -> dict[str, Any]:
    """The member of an update that says how instances, or the copies of a component, are replaced.
    Without one all new instances start beside the former.
    """
    if options.rolling is not None and options.rolling not in PERCENTS:
        raise Refused(
            f"--rolling takes 5 to 50 percent of the instances or copies, given {options.rolling}"
        )

    if options.rolling is None and not options.alarm:
        if options.wait_s is not None:
            raise Refused("--wait-s goes with --rolling or --alarm")

        return {}

    wait_s = options.wait_s or 0
    if options.rolling is None and options.component:
        raise Refused("--alarm of a --component needs --rolling")

    if options.rolling is None:
        routing = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": wait_s}
        config: dict[str, Any] = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing}}
    else:
        batch = {"Type": "CAPACITY_PERCENT", "Value": options.rolling}
        config = {
            "RollingUpdatePolicy": {"MaximumBatchSize": batch, "WaitIntervalInSeconds": wait_s}
        }

    if options.alarm:
        alarms = [{"AlarmName": name} for name in options.alarm]
        config["AutoRollbackConfiguration"] = {"Alarms": alarms}

    return {"DeploymentConfig": config}


def is_of(name: str, endpoint: str) -> bool:
    """Whether a configuration or a model has a name that was given here for this endpoint."""
    timed = re.escape(endpoint[:MAX_STEM_CHARS]) + r"-\d{8}-\d{6}"
    return name == endpoint or re.fullmatch(timed, name) is not None
