"""The operations that invoke an endpoint: InvokeEndpoint, streamed or async, and OpenAI's chat completions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import orjson

from lmi.gateway import eventstream
from lmi.gateway.container import Answer, ContainerFault, Header, OutOfTime, Unreachable
from lmi.gateway.endpoints import Endpoint
from lmi.gateway.errors import AwsError, model_error, timed_out, unavailable, unknown_operation
from lmi.gateway.gateway import VARIANT, Gateway, Request, headers_for_container, path_to_model
from lmi.gateway.members import COMPONENT_NAME, INVOKE, OPENAI, PREFIX, STREAM, Member

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 4096  # of an answer; the platform refuses more of an asynchronous one
MAX_ERROR_BYTES = 16 << 10  # that are read of an error, of which a client sees 2048 characters
PASSED = ("Custom-Attributes", "Closed-Session-Id", "New-Session-Id")
ALLOTTED = "Your model primary did not complete sending the inference response in the allotted time."
BROKEN = "The connection to your model primary was lost before the inference response was complete."


async def invoke(request: Request, gateway: Gateway) -> None:
    """Send the container's whole answer."""
    async with _invocation(request, gateway, INVOKE, gateway.settings.timeout_s) as answer:
        if answer.is_chunked:
            log.warning("the container's answer is chunked: an asynchronous endpoint would refuse it")
        body = await answer.read()
    await request.exchange.send_whole(200, answer.header("content-type") or "", body, headers_for_client(answer))


async def stream(request: Request, gateway: Gateway) -> None:
    """Send the container's answer as an event stream, part by part."""
    exchange = request.exchange
    async with _invocation(request, gateway, STREAM, gateway.settings.stream_timeout_s) as answer:
        headers = headers_for_client(answer)
        headers += [(PREFIX + "Content-Type", value) for value in filter(None, [answer.header("content-type")])]
        async with aclosing(gateway.settings.parts.cut(answer)) as parts:
            async for part in parts:
                if not exchange.status:
                    await exchange.start(200, eventstream.MEDIA_TYPE, headers)
                await exchange.write(eventstream.part(part))
        if not exchange.status and isinstance(answer.fault, OutOfTime):
            raise answer.fault
    if not exchange.status:
        await exchange.start(200, eventstream.MEDIA_TYPE, headers)
    if answer.fault is not None:
        await exchange.write(_failure(answer.fault))
    await exchange.end()


def _failure(fault: ContainerFault) -> bytes:
    log.warning("a stream ends with an error: %s", fault)
    if isinstance(fault, OutOfTime):
        return eventstream.failure("ModelInvocationTimeExceeded", ALLOTTED)
    return eventstream.failure("StreamBroken", BROKEN)


async def chat(request: Request, gateway: Gateway) -> None:
    """Send what the container's /v1/chat/completions answers: its status and bytes, of errors too."""
    endpoint, values = gateway.endpoints.find(request.names["endpoint"]), request.values(OPENAI)
    if component := request.names.get("component"):
        values[COMPONENT_NAME.name] = COMPONENT_NAME.check(component)
    exchange, timeout_s = request.exchange, gateway.settings.stream_timeout_s
    async with _call(request, gateway, endpoint, values, "/v1/chat/completions", timeout_s) as answer:
        length = [("content-length", value) for name, value in answer.headers if name == "content-length"]
        await exchange.start(answer.status, answer.header("content-type") or "", [*length, *headers_for_client(answer)])
        while chunk := await answer.receive():
            await exchange.write(chunk)
        if answer.fault is not None:
            raise answer.fault  # the client's connection is cut, which shows that the answer is not whole
    await exchange.end()


async def invoke_later(request: Request, gateway: Gateway) -> None:
    """Accept an async invocation, and send where its answer will be."""
    endpoint = gateway.endpoints.find(request.names["endpoint"])
    if gateway.async_invocations is None:
        raise unknown_operation()
    await endpoint.health.check_was_ready()
    accepted = gateway.async_invocations.accept(request, endpoint)
    locations = [(PREFIX + "OutputLocation", accepted.output), (PREFIX + "FailureLocation", accepted.failure)]
    body = orjson.dumps({"InferenceId": accepted.inference_id})
    await request.exchange.send_whole(202, "application/json", body, locations)


@asynccontextmanager
async def _invocation(
    request: Request, gateway: Gateway, members: tuple[Member, ...], timeout_s: float
) -> AsyncIterator[Answer]:
    """Yield the model's answer. Raises AwsError for an error of the container, or where no answer came in time."""
    endpoint, values = gateway.endpoints.find(request.names["endpoint"]), request.values(members)
    async with path_to_model(gateway, endpoint, values, request.region) as path:
        async with _call(request, gateway, endpoint, values, path, timeout_s) as answer:
            if answer.status >= 300:
                raise model_error(answer.status, await _beginning(answer), endpoint.name, request.region)
            yield answer


async def _beginning(answer: Answer) -> str:
    """Return as much of an answer's text as an error can hold."""
    text = b""
    while len(text) < MAX_ERROR_BYTES and (chunk := await answer.receive()):
        text += chunk
    return text.decode(errors="replace")


@asynccontextmanager
async def _call(
    request: Request, gateway: Gateway, endpoint: Endpoint, values: dict[str, str], path: str, timeout_s: float
) -> AsyncIterator[Answer]:
    """Yield the container's answer. Raises AwsError where it does not come whole, as far as it was awaited here."""
    component = values.get(COMPONENT_NAME.name)
    adapter = gateway.components.adapter(endpoint.name, component)
    headers = headers_for_container(values, endpoint.name, component, adapter)
    await endpoint.health.check_was_ready()
    try:
        async with endpoint.container.call("POST", path, headers, request.body, timeout_s) as answer:
            if answer.num_header_bytes > MAX_HEADER_BYTES:
                log.warning("the container's answer has %d bytes of headers", answer.num_header_bytes)
            yield answer
    except ContainerFault as fault:
        raise as_aws_error(fault, endpoint, request.region) from fault


def as_aws_error(fault: ContainerFault, endpoint: Endpoint, region: str) -> AwsError:
    """Return what a client gets where the container gave no whole answer."""
    if isinstance(fault, OutOfTime):
        return timed_out(endpoint.name, region)
    if isinstance(fault, Unreachable):
        return unavailable(f"The container at {endpoint.container.url} is not there: {fault}")
    return model_error(0, str(fault), endpoint.name, region)


def headers_for_client(answer: Answer) -> list[Header]:
    """Return what a client gets of the container's headers, beside the content type, and the variant."""
    headers = [("x-Amzn-Invoked-Production-Variant", VARIANT)]
    headers += [(PREFIX + name, value) for name in PASSED if (value := answer.header((PREFIX + name).lower()))]
    created = answer.header((PREFIX + "Session-Id").lower())
    if created and "; Expires=" in created and answer.header((PREFIX + "New-Session-Id").lower()) is None:
        headers.append((PREFIX + "New-Session-Id", created))
    return headers
