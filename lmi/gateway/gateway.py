"""The operations: those that invoke an endpoint, and DescribeEndpoint and ListEndpoints for waiters and people.

The latter are AWS JSON 1.1: a POST of / that names the operation in X-Amz-Target. An endpoint never changes after the
gateway first heard of it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from lmi.errors import shorten
from lmi.gateway import eventstream
from lmi.gateway.async_invocations import AsyncInvocations, read_job
from lmi.gateway.command import GatewaySettings
from lmi.gateway.container import ContainerFault, ContainerResponse, OutOfTime
from lmi.gateway.endpoints import AwsEndpoint, Endpoints
from lmi.gateway.exchange import INVOKE, OPENAI, PREFIX, STREAM, VARIANT, AwsError, AwsExchange, AwsMember, model_error
from lmi.gateway.stores import S3_SCHEME, FolderOutput, Inputs, S3Output
from lmi.gateway.target_models import ModelStore, TargetModels
from lmi.http.body import BodyMemory
from lmi.http.exchange import MAX_HEADER_BYTES, Header, num_bytes

MAX_BODY_MEMORY = 1 << 30
MAX_ERROR_BYTES = 16 << 10  # that are read of an error, of which a client sees 2048 characters
PASSED = ("Custom-Attributes", "Closed-Session-Id", "New-Session-Id")
ALLOTTED = "Your model primary did not complete sending the inference response in the allotted time."
BROKEN = "The connection to your model primary was lost before the inference response was complete."

MEDIA_TYPE = "application/x-amz-json-1.1"

log = logging.getLogger(__name__)
Members = dict[str, Any]
Input = TypeVar("Input")


class Gateway:
    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.endpoints = Endpoints(settings.endpoints, settings.components)
        self.num_body_bytes = 0  # of all requests that are open
        self.body_memory = BodyMemory(self, max(MAX_BODY_MEMORY, 4 * settings.max_body_bytes))
        stores = {name: ModelStore(source, settings.models_dir) for name, source in settings.models.items()}
        self._target_models = TargetModels(stores, settings.timeout_s)
        place, self._inputs = settings.async_output, Inputs(settings.async_input)
        output = S3Output(place) if place.startswith(S3_SCHEME) else FolderOutput(Path(place))
        self._async_invocations = AsyncInvocations(self._inputs, output, settings.async_concurrency)

    async def close(self) -> None:
        """End what has its own tasks, after the last request."""
        await self._target_models.close()
        await self._async_invocations.close()

    async def invoke(self, exchange: AwsExchange) -> None:
        """Send the container's whole response."""
        async with self._invocation(exchange, INVOKE, self.settings.timeout_s) as response:
            if response.is_chunked:
                log.warning("the container's answer is chunked: an asynchronous endpoint would refuse it")
            body = await response.read()
        await exchange.send_whole(200, response.header("content-type"), body, headers_for_client(response))

    async def stream(self, exchange: AwsExchange) -> None:
        """Send the container's response as an event stream, part by part."""
        async with self._invocation(exchange, STREAM, self.settings.stream_timeout_s) as response:
            headers = [*headers_for_client(response), (PREFIX + "Content-Type", response.header("content-type"))]
            async with aclosing(self.settings.parts.cut(response)) as parts:
                async for part in parts:
                    if not exchange.status:
                        await exchange.start(200, eventstream.MEDIA_TYPE, headers)
                    await exchange.write(eventstream.part(part))
            fault, is_late = response.fault, isinstance(response.fault, OutOfTime)
            if not exchange.status:
                if fault is not None and is_late:
                    raise fault
                await exchange.start(200, eventstream.MEDIA_TYPE, headers)
        if fault is not None:
            log.warning("a stream ends with an error: %s", fault)
            said = ("ModelInvocationTimeExceeded", ALLOTTED) if is_late else ("StreamBroken", BROKEN)
            await exchange.write(eventstream.failure(*said))
        await exchange.end()

    async def chat(self, exchange: AwsExchange) -> None:
        """Send what the container's /v1/chat/completions answers: its status and bytes, of errors too."""
        endpoint, values = self.endpoints.find(exchange.names["endpoint"]), exchange.values(OPENAI)
        timeout_s = self.settings.stream_timeout_s
        async with self._call(exchange, endpoint, values, "/v1/chat/completions", timeout_s) as response:
            headers = [("content-length", response.header("content-length")), *headers_for_client(response)]
            await exchange.start(response.status, response.header("content-type"), headers)
            while chunk := await response.receive():
                await exchange.write(chunk)
            if response.fault is not None:
                raise response.fault  # the client's connection is cut, which shows that the answer is not whole
        await exchange.end()

    async def invoke_later(self, exchange: AwsExchange) -> None:
        """Accept an async invocation, and send where its answer will be."""
        endpoint = self.endpoints.find(exchange.names["endpoint"])
        await endpoint.health.check_was_ready()
        job, url = read_job(exchange, endpoint, self._inputs), self._async_invocations.output.url
        self._async_invocations.add(job)
        locations = [(PREFIX + "OutputLocation", url(job.output)), (PREFIX + "FailureLocation", url(job.failure))]
        body = orjson.dumps({"InferenceId": job.inference_id})
        await exchange.send_whole(202, "application/json", body, locations)

    @asynccontextmanager
    async def _invocation(
        self, exchange: AwsExchange, members: tuple[AwsMember, ...], timeout_s: float
    ) -> AsyncIterator[ContainerResponse]:
        """Yield the model's response. Raises AwsError for an error of the container, or where none came in time."""
        endpoint, values = self.endpoints.find(exchange.names["endpoint"]), exchange.values(members)
        async with self._target_models.path(endpoint, values.get("TargetModel"), exchange.region) as path:
            async with self._call(exchange, endpoint, values, path, timeout_s) as response:
                if response.status >= 300:
                    text = b""
                    while len(text) < MAX_ERROR_BYTES and (chunk := await response.receive()):
                        text += chunk
                    raise model_error(response.status, text.decode(errors="replace"), endpoint.name, exchange.region)
                yield response

    @asynccontextmanager
    async def _call(
        self, exchange: AwsExchange, endpoint: AwsEndpoint, values: dict[str, str], path: str, timeout_s: float
    ) -> AsyncIterator[ContainerResponse]:
        """Yield the container's response. Raises AwsError where it does not come whole while the block runs."""
        adapter = self.endpoints.adapter(endpoint.name, values.get("InferenceComponentName"))
        headers = exchange.headers_for_container(values, adapter)
        await endpoint.health.check_was_ready()
        try:
            async with endpoint.container.call("POST", path, headers, exchange.payload, timeout_s) as response:
                if (found := num_bytes(response.headers)) > MAX_HEADER_BYTES:
                    log.warning("the container's answer has %d bytes of headers", found)
                yield response
        except ContainerFault as fault:
            raise endpoint.error(fault, exchange.region) from fault


def headers_for_client(response: ContainerResponse) -> list[Header]:
    """Return what a client gets of the container's headers, beside the content type, and the variant."""
    headers = [("x-Amzn-Invoked-Production-Variant", VARIANT)]
    headers += [(PREFIX + name, response.header(PREFIX + name)) for name in PASSED]
    created = response.header(PREFIX + "Session-Id")
    if "; Expires=" in created and not response.header(PREFIX + "New-Session-Id"):
        headers.append((PREFIX + "New-Session-Id", created))
    return headers


class Described(msgspec.Struct):
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


async def control(gateway: Gateway, exchange: AwsExchange) -> None:
    target = exchange.headers.get("x-amz-target", "")
    if target not in OPERATIONS:
        raise AwsError("UnknownOperationException", 400, f"The gateway has no operation {shorten(target)}.")
    answer = await OPERATIONS[target](gateway, exchange)
    await exchange.send_whole(200, MEDIA_TYPE, orjson.dumps(answer))


async def describe(gateway: Gateway, exchange: AwsExchange) -> Members:
    name = _decode(exchange, Described).EndpointName
    try:
        endpoint = gateway.endpoints.find(name)
    except AwsError:
        raise _invalid(f"Could not find endpoint {shorten(name)}.") from None
    status, reason = await endpoint.health.status()
    variant = {"VariantName": VARIANT, "CurrentWeight": 1.0, "DesiredWeight": 1.0}
    variant |= {"CurrentInstanceCount": 1, "DesiredInstanceCount": 1}
    details = {"EndpointConfigName": endpoint.name, "ProductionVariants": [variant]}
    why = {"FailureReason": reason} if reason else {}
    return _summary(endpoint, status, exchange.region) | details | why


async def list_endpoints(gateway: Gateway, exchange: AwsExchange) -> Members:
    asked = _decode(exchange, Listed)
    endpoints = gateway.endpoints.all()
    healths = list({endpoint.health for endpoint in endpoints})
    statuses = dict(zip(healths, await asyncio.gather(*(health.status() for health in healths)), strict=True))
    found = [_summary(endpoint, statuses[endpoint.health][0], exchange.region) for endpoint in endpoints]
    chosen = [endpoint for endpoint in found if asked.takes(endpoint)]
    chosen.sort(key=lambda endpoint: endpoint[SORT_KEYS[asked.SortBy]], reverse=asked.SortOrder == "Descending")
    begin = int(asked.NextToken)
    end = begin + asked.MaxResults
    return {"Endpoints": chosen[begin:end]} | ({"NextToken": str(end)} if end < len(chosen) else {})


OPERATIONS: dict[str, Callable[[Gateway, AwsExchange], Awaitable[Members]]] = {
    "SageMaker.DescribeEndpoint": describe,
    "SageMaker.ListEndpoints": list_endpoints,
}


def _summary(endpoint: AwsEndpoint, status: str, region: str) -> Members:
    return {
        "EndpointName": endpoint.name,
        "EndpointArn": endpoint.arn(region),
        "CreationTime": endpoint.created_s,
        "LastModifiedTime": endpoint.created_s,
        "EndpointStatus": status,
    }


def _decode(exchange: AwsExchange, kind: type[Input]) -> Input:
    try:
        return msgspec.json.decode(exchange.payload or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> AwsError:
    return AwsError("ValidationException", 400, message)
