"""DescribeEndpoint and ListEndpoints, for waiters and for people who look around.

They are AWS JSON 1.1: a POST of / that names the operation in X-Amz-Target. An endpoint never changes after the gateway
first heard of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from lmi.errors import shorten
from lmi.gateway.endpoints import AwsEndpoint
from lmi.gateway.exchange import VARIANT, AwsError, AwsRequest, cut
from lmi.gateway.gateway import Gateway

MEDIA_TYPE = "application/x-amz-json-1.1"
MAX_REASON_CHARS = 1024
Members = dict[str, Any]
Input = TypeVar("Input")
Operation = Callable[[Gateway, AwsRequest], Awaitable[Members]]


class Described(msgspec.Struct):
    """The input of DescribeEndpoint."""

    EndpointName: str


class Listed(msgspec.Struct):
    """The input of ListEndpoints. Times are seconds since 1970."""

    SortBy: Literal["Name", "CreationTime", "Status"] = "CreationTime"
    SortOrder: Literal["Ascending", "Descending"] = "Descending"
    NextToken: Annotated[str, Meta(pattern="^[0-9]{1,9}$")] = "0"
    MaxResults: Annotated[int, Meta(ge=1, le=100)] = 10
    NameContains: str = ""
    StatusEquals: str = ""
    CreationTimeAfter: float = 0.0
    CreationTimeBefore: float = float("inf")
    LastModifiedTimeAfter: float = 0.0
    LastModifiedTimeBefore: float = float("inf")

    def takes(self, endpoint: Members) -> bool:
        return (
            self.NameContains in endpoint["EndpointName"]
            and self.StatusEquals in ("", endpoint["EndpointStatus"])
            and self.CreationTimeAfter < endpoint["CreationTime"] < self.CreationTimeBefore
            and self.LastModifiedTimeAfter < endpoint["LastModifiedTime"] < self.LastModifiedTimeBefore
        )


SORT_KEYS = {"Name": "EndpointName", "CreationTime": "CreationTime", "Status": "EndpointStatus"}


async def control(gateway: Gateway, request: AwsRequest) -> None:
    """Run the operation that the request names."""
    target = request.exchange.headers.get("x-amz-target", "")
    if target not in OPERATIONS:
        raise AwsError("UnknownOperationException", 400, f"The gateway has no operation {shorten(target)}.")
    answer = await OPERATIONS[target](gateway, request)
    await request.exchange.send_whole(200, MEDIA_TYPE, orjson.dumps(answer))


async def describe(gateway: Gateway, request: AwsRequest) -> Members:
    name = _decode(request, Described).EndpointName
    try:
        endpoint = gateway.endpoints.find(name)
    except AwsError:
        raise _invalid(f"Could not find endpoint {shorten(name)}.") from None
    status, reason = await endpoint.health.status()
    variant = {"VariantName": VARIANT, "CurrentWeight": 1.0, "DesiredWeight": 1.0}
    variant |= {"CurrentInstanceCount": 1, "DesiredInstanceCount": 1}
    details = {"EndpointConfigName": endpoint.name, "ProductionVariants": [variant]}
    why = {"FailureReason": cut(reason, MAX_REASON_CHARS)} if reason else {}
    return _summary(endpoint, status, request.region) | details | why


async def list_endpoints(gateway: Gateway, request: AwsRequest) -> Members:
    asked = _decode(request, Listed)
    endpoints = gateway.endpoints.all()
    healths = list({endpoint.health for endpoint in endpoints})
    statuses = dict(zip(healths, await asyncio.gather(*(health.status() for health in healths)), strict=True))
    found = [_summary(endpoint, statuses[endpoint.health][0], request.region) for endpoint in endpoints]
    chosen = [endpoint for endpoint in found if asked.takes(endpoint)]
    chosen.sort(key=lambda endpoint: endpoint[SORT_KEYS[asked.SortBy]], reverse=asked.SortOrder == "Descending")
    begin = int(asked.NextToken)
    end = begin + asked.MaxResults
    return {"Endpoints": chosen[begin:end]} | ({"NextToken": str(end)} if end < len(chosen) else {})


OPERATIONS: dict[str, Operation] = {"SageMaker.DescribeEndpoint": describe, "SageMaker.ListEndpoints": list_endpoints}


def _summary(endpoint: AwsEndpoint, status: str, region: str) -> Members:
    return {
        "EndpointName": endpoint.name,
        "EndpointArn": endpoint.arn(region),
        "CreationTime": endpoint.created_s,
        "LastModifiedTime": endpoint.created_s,
        "EndpointStatus": status,
    }


def _decode(request: AwsRequest, kind: type[Input]) -> Input:
    try:
        return msgspec.json.decode(request.body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> AwsError:
    return AwsError("ValidationException", 400, message)
