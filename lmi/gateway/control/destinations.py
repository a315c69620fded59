"""Finds the destinations of an inference router, endpoints and inference components, by ARN."""

import re
from contextlib import suppress

from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import (
    IN_SERVICE,
    UPDATING,
    ComponentResource,
    EndpointResource,
)
from lmi.gateway.control.service_model import Members
from lmi.gateway.errors import ACCOUNT, AwsError
from lmi.gateway.routing_target import Destination

# The parts of an ARN that count here. It was checked before by the pattern of botocore's model.
ARN = re.compile("[^:]+:[^:]+:sagemaker:(?P<region>[^:]+):(?P<account>[^:]+):[^/]+/(?P<name>.+)")
ROUTABLE = "Routable"
UNROUTABLE = "Unroutable"
UNKNOWN = "Unknown"


def region_of(arn: str) -> str:
    """Return the region that an ARN names."""
    return _match(arn)["region"]


def endpoint_of(plane: Plane, arn: str) -> EndpointResource | None:
    """Return the endpoint of an ARN, or None if this gateway has none."""
    endpoint = plane.store.endpoints.get(_match(arn)["name"])
    return endpoint if endpoint is not None and endpoint.arn == arn else None


def component_of(plane: Plane, arn: str) -> ComponentResource | None:
    """Return the inference component of an ARN, or None if this gateway has none."""
    component = plane.store.components.get(_match(arn)["name"])
    return component if component is not None and component.arn == arn else None


def is_asynchronous(endpoint: EndpointResource) -> bool:
    """Whether an endpoint is one for asynchronous requests."""
    return endpoint.deployment.config.get("AsyncInferenceConfig") is not None


def find(plane: Plane, arn: str, region: str, is_async: bool) -> Destination:
    """Return the destination that an ARN names, for a router of `region` and its asynchronous or
    other requests.

    If this gateway does not have it, or it takes no such requests, its `num_ready` is 0.
    """
    is_local = region_of(arn) == region
    endpoint = endpoint_of(plane, arn)
    if endpoint is not None:
        num_ready = 0
        if is_asynchronous(endpoint) == is_async:
            num_ready = plane.endpoints.life(endpoint.name).num_answering

        return Destination(arn=arn, endpoint=endpoint.name, is_local=is_local, num_ready=num_ready)

    component = component_of(plane, arn)
    if component is not None and not is_async:
        endpoint_name = component.members["EndpointName"]
        return Destination(
            arn=arn,
            endpoint=endpoint_name,
            component=component.name,
            is_local=is_local,
            num_ready=_num_copies(plane, endpoint_name, component.name),
        )

    return Destination(arn=arn, is_local=is_local)


def described(destination: Destination) -> Members:
    """Return a destination as DescribeInferenceRouter tells of it."""
    status = ROUTABLE if destination.num_ready else UNROUTABLE
    if _match(destination.arn)["account"] != ACCOUNT:
        # It belongs to another account, into which no gateway can look.
        status = UNKNOWN

    return {"ResourceArn": destination.arn, "RoutingStatus": status}


def _match(arn: str) -> re.Match[str]:
    match = ARN.fullmatch(arn)
    assert match is not None
    return match


def _num_copies(plane: Plane, endpoint: str, name: str) -> int:
    """Return how many copies of a component serve."""
    component = plane.components.life(name)
    if component.resource.status not in (IN_SERVICE, UPDATING):
        return 0

    with suppress(AwsError):
        plane.invoked(endpoint).serving()
        return component.group().num_ready

    return 0
