"""The gateway's ASGI application: the operations that invoke an endpoint, and answers to errors."""

import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from lmi.errors import ClientGone, LmiError
from lmi.gateway import eventstream
from lmi.gateway.async_invocations import AsyncInvocations
from lmi.gateway.async_job import AsyncJob
from lmi.gateway.async_queue import AsyncQueue
from lmi.gateway.aws_endpoint import AwsEndpoint, EndpointTable
from lmi.gateway.bearer_tokens import BearerTokens
from lmi.gateway.container import ContainerFault, ContainerResponse, OutOfTime
from lmi.gateway.errors import (
    AwsError,
    aws_error,
    invalid,
    model_error,
    too_large,
    unknown_operation,
)
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.members import COMPONENT_NAME, PREFIX
from lmi.gateway.model_store import ModelStore
from lmi.gateway.named_endpoints import NamedEndpoints
from lmi.gateway.request_prefix import RequestPrefix
from lmi.gateway.routing_target import MAX_ATTEMPTS, Destination, RoutingTarget, is_refusal
from lmi.gateway.settings import GatewaySettings
from lmi.gateway.signatures import Signatures, Signed
from lmi.gateway.stores import Answers, Inputs
from lmi.gateway.target_models import TargetModels
from lmi.http.body import BodyMemory
from lmi.http.browsers import ANY, check_page, is_loopback
from lmi.http.exchange import MAX_HEADER_BYTES, BodyTooLarge, Header, num_bytes

# The bound in AWS's API model. Its pages say 25 MB.
LARGE_BODY_BYTES = 6291456
MAX_BODY_MEMORY = 1 << 30
# As much is read of an error, of which a client sees 2048 characters.
MAX_ERROR_BYTES = 16 << 10
# In a container. A client may name another in place of the second.
CHAT_PATH = "/v1/chat/completions"
STREAM_PATH = "invocations-bidirectional-stream"
VARIANT_HEADER = "x-Amzn-Invoked-Production-Variant"
# The headers of a container that its client gets.
PASSED = ("Custom-Attributes", "Closed-Session-Id", "New-Session-Id")
# What a stream ends with, if it does not come in time or whole.
ALLOTTED = (
    "Your model primary did not complete sending the inference response in the allotted time."
)
BROKEN = "The connection to your model primary was lost before the inference response was complete."


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoutedAnswer:
    """The answer of a destination of an inference router, and why the router chose it."""

    response: ContainerResponse
    body: bytes
    destination: Destination
    reason: str


class Gateway:
    """The ASGI application: the operations, and the answers to errors."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        answers = Answers(settings.async_output, settings.async_buckets)
        self.endpoints = _endpoints(settings, answers)
        # Of all requests that are open.
        self.num_body_bytes = 0
        self.body_memory = BodyMemory(self, max(MAX_BODY_MEMORY, 4 * settings.max_body_bytes))

        stores = {}
        for name, source in settings.models.items():
            stores[name] = ModelStore(source, settings.models_dir)

        self._target_models = TargetModels(stores, settings.timeout_s)
        self._async_invocations = AsyncInvocations(
            self.endpoints,
            Inputs(settings.async_input),
            answers,
            _queue(settings),
            settings.async_concurrency,
        )
        self._signatures: Signatures | None = None
        self._bearer_tokens: BearerTokens | None = None
        if settings.checks_signatures:
            self._signatures = Signatures(os.environ)
            self._bearer_tokens = BearerTokens(self._signatures.credentials, os.environ)

        self._hosts = () if is_loopback(settings.host) else (ANY,)

    async def start(self) -> None:
        """Begin what has its own tasks, before the first request."""
        await self.endpoints.start()
        await self._async_invocations.start()

    async def close(self) -> None:
        """End what has its own tasks, after the last request."""
        await self._target_models.close()
        await self._async_invocations.close()
        await self.endpoints.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AwsExchange(scope, receive, send)

        try:
            await self._answer(exchange)
        except ClientGone:
            exchange.status = ClientGone.status
        except LmiError as error:
            await _refuse(exchange, error)
        except Exception:
            log.exception("request %s failed in the gateway", exchange.request_id)
            message = f"internal error, request {exchange.request_id}"
            await _refuse(exchange, AwsError("InternalFailure", 500, message))
        finally:
            exchange.hold(0)
            if exchange.path != "/ping":
                exchange.log_access(time.monotonic() - exchange.started_s)

    async def _answer(self, exchange: AwsExchange) -> None:
        """Find the operation, read and check its request, and let it answer."""
        if exchange.path == "/ping" and exchange.method in ("GET", "HEAD"):
            await exchange.send_whole(200, "", b"")
            return

        # No page has a signature.
        if self._signatures is None:
            check_page(exchange, (), self._hosts)

        handler = None
        if exchange.method == "POST":
            handler = _find_handler(exchange)

        if handler is None:
            raise unknown_operation()

        if handler is Gateway.converse:
            await self.converse(exchange)
            return

        signed = self._check_head(exchange, takes_tokens=handler is Gateway.chat)
        max_bytes = self.settings.max_body_bytes
        if exchange.is_routed:
            max_bytes = min(max_bytes, LARGE_BODY_BYTES)

        try:
            exchange.payload = await exchange.body(max_bytes, self.body_memory)
        except BodyTooLarge:
            raise too_large(max_bytes) from None

        size = len(exchange.payload)
        if size > LARGE_BODY_BYTES:
            log.warning("a body of %d bytes: AWS's API model allows %d", size, LARGE_BODY_BYTES)

        if self._signatures is not None and signed is not None:
            self._signatures.check_body(exchange, signed)

        await exchange.run_while_there(handler(self, exchange))

    def _check_head(self, exchange: AwsExchange, takes_tokens: bool) -> Signed | None:
        """Return what the head says of the signature, None where the body is not signed.

        Raises AwsError where the credentials of the request, if they are checked, are not good.
        """
        tokens = self._bearer_tokens
        if takes_tokens and tokens is not None and tokens.is_sent(exchange):
            tokens.check(exchange)
            return None

        return None if self._signatures is None else self._signatures.check_head(exchange)

    async def invoke(self, exchange: AwsExchange) -> None:
        """Send the container's whole response."""
        values = exchange.values("InvokeEndpoint")
        endpoint = self._find(exchange, values)
        timeout_s = self.settings.timeout_s
        async with self._invocation(exchange, endpoint, values, timeout_s) as response:
            if response.is_chunked:
                log.warning(
                    "the container's answer is chunked: an asynchronous endpoint would refuse it"
                )

            body = await response.read()

        headers = headers_for_client(response, exchange.variant)
        await exchange.send_whole(200, response.header("content-type"), body, headers)

    async def stream(self, exchange: AwsExchange) -> None:
        """Send the container's response as an event stream, part by part."""
        values = exchange.values("InvokeEndpointWithResponseStream")
        endpoint = self._find(exchange, values)
        timeout_s = self.settings.stream_timeout_s
        async with self._invocation(exchange, endpoint, values, timeout_s) as response:
            headers = headers_for_client(response, exchange.variant)
            headers.append((PREFIX + "Content-Type", response.header("content-type")))
            async with aclosing(self.settings.parts.cut(response)) as parts:
                async for part in parts:
                    if not exchange.status:
                        await exchange.start(200, eventstream.MEDIA_TYPE, headers)

                    await exchange.write(eventstream.part(part))

            fault = response.fault
            if not exchange.status:
                if isinstance(fault, OutOfTime):
                    raise fault

                await exchange.start(200, eventstream.MEDIA_TYPE, headers)

        if fault is not None:
            log.warning("a stream ends with an error: %s", fault)
            if isinstance(fault, OutOfTime):
                failure = eventstream.failure("ModelInvocationTimeExceeded", ALLOTTED)
            else:
                failure = eventstream.failure("StreamBroken", BROKEN)

            await exchange.write(failure)

        await exchange.end()

    async def chat(self, exchange: AwsExchange) -> None:
        """Send what the container's /v1/chat/completions answers: its status and bytes, of errors
        too.
        """
        values = exchange.values("chat")
        endpoint = self._find(exchange, values)
        timeout_s = self.settings.stream_timeout_s
        async with self._call(exchange, endpoint, values, CHAT_PATH, timeout_s) as response:
            headers = [
                ("content-length", response.header("content-length")),
                *headers_for_client(response, exchange.variant),
            ]
            await exchange.start(response.status, response.header("content-type"), headers)
            while chunk := await response.receive():
                await exchange.write(chunk)

            if response.fault is not None:
                # The client's connection is cut, which shows that the answer is not whole.
                raise response.fault

        await exchange.end()

    async def converse(self, exchange: AwsExchange) -> None:
        """Pass on what client and container send, until one of them ends."""
        # Who has no HTTP/2 does not import it.
        from lmi.gateway.container_socket import SocketRefused, open_socket
        from lmi.gateway.duplex_invocation import DuplexInvocation
        from lmi.gateway.event_signatures import SignatureChain
        from lmi.gateway.request_parts import RequestParts

        chain = None
        if self._signatures is not None:
            signed = self._signatures.check_head(exchange, signs_events=True)
            chain = SignatureChain(self._signatures.credentials.secret_key, signed)

        exchange.read_in_pieces(self.body_memory)
        values = exchange.values("InvokeEndpointWithBidirectionalStream")
        endpoint = self._find(exchange, values)
        adapter = self.endpoints.adapter(endpoint.name, values.get("InferenceComponentName"))
        headers = exchange.headers_for_container(values, endpoint.name, adapter)
        target = "/" + values.get("ModelInvocationPath", STREAM_PATH)
        if "ModelQueryString" in values:
            target += "?" + values["ModelQueryString"]

        await endpoint.container.check_was_ready()

        max_bytes = self.settings.max_body_bytes
        timeout_s = self.settings.timeout_s
        prefix = RequestPrefix(b"", values.get("PrefixAwareId", ""))
        try:
            with endpoint.container.lease(prefix) as container:
                async with open_socket(container, target, headers, max_bytes, timeout_s) as socket:
                    variant = (VARIANT_HEADER, exchange.variant)
                    await exchange.start(200, eventstream.MEDIA_TYPE, [variant])
                    parts = RequestParts(exchange, max_bytes, chain)
                    await DuplexInvocation(exchange, parts, socket).run()
        except SocketRefused as refusal:
            text = str(refusal)
            raise model_error(refusal.status, text, endpoint.name, exchange.region) from refusal
        except ContainerFault as fault:
            raise endpoint.error(fault, exchange.region) from fault

    async def invoke_later(self, exchange: AwsExchange) -> None:
        """Accept an async invocation, and send where its answer will be."""
        endpoint = self._find(exchange, exchange.values("InvokeEndpointAsync"))
        await endpoint.container.check_was_ready()
        job = await self._async_invocations.accept(exchange, endpoint)
        await _send_acceptance(exchange, job)

    async def route(self, exchange: AwsExchange) -> None:
        """Send the whole response of a destination of an inference router, of a second one where
        the first one refuses.
        """
        values = exchange.values("InvokeInferenceRouter")
        target = self._routing_target(exchange, values)
        if target.answers is not None:
            raise invalid(f"Routing target {target.name} is for asynchronous requests.")

        if not exchange.payload:
            raise invalid("Body must not be empty.")

        answer = await self._routed(exchange, target, values)
        headers = [
            *headers_for_client(answer.response, exchange.variant),
            (PREFIX + "Invoked-Routed-Resource-Arn", answer.destination.arn),
            (PREFIX + "Invoked-Routing-Reason", answer.reason),
        ]
        media_type = answer.response.header("content-type")
        await exchange.send_whole(200, media_type, answer.body, headers)

    async def route_later(self, exchange: AwsExchange) -> None:
        """Accept an async invocation of an inference router, and send where its answer will be."""
        values = exchange.values("InvokeInferenceRouterAsync")
        target = self._routing_target(exchange, values)
        job = await self._async_invocations.accept_routed(exchange, target)
        await _send_acceptance(exchange, job)

    async def control(self, exchange: AwsExchange) -> None:
        """Answer AWS JSON 1.1: a POST of / that names the operation in X-Amz-Target."""
        target = exchange.headers.get("x-amz-target", "")
        answer = await self.endpoints.answer(target, exchange.payload, exchange.region)
        await exchange.send_whole(200, "application/x-amz-json-1.1", orjson.dumps(answer))

    def _find(self, exchange: AwsExchange, values: dict[str, str]) -> AwsEndpoint:
        """Return the endpoint that a request means, and note its variant. Raises AwsError."""
        endpoint = self.endpoints.find(exchange.names["endpoint"], values)
        exchange.variant = endpoint.variant
        return endpoint

    def _routing_target(self, exchange: AwsExchange, values: dict[str, str]) -> RoutingTarget:
        """Return what a request to an inference router means. Raises AwsError."""
        return self.endpoints.routing_target(
            exchange.names["router"], values.get("RoutingTargetName", "")
        )

    async def _routed(
        self, exchange: AwsExchange, target: RoutingTarget, values: dict[str, str]
    ) -> RoutedAnswer:
        """Return the answer of the first destination that takes a request. Raises AwsError."""
        tried: list[Destination] = []
        refusal = target.not_served()
        for destination in target.in_order()[:MAX_ATTEMPTS]:
            try:
                response, body = await self._ask(exchange, destination, values)
            except AwsError as error:
                if not is_refusal(error):
                    raise

                log.warning("%s has refused a request of a router: %s", destination.arn, error)
                refusal = error
                tried.append(destination)
            else:
                reason = target.reason(destination, tried)
                return RoutedAnswer(response, body, destination, reason)

        raise refusal

    async def _ask(
        self, exchange: AwsExchange, destination: Destination, values: dict[str, str]
    ) -> tuple[ContainerResponse, bytes]:
        """Return the response of a router's destination, and its body. Raises AwsError."""
        if destination.component:
            values = {**values, COMPONENT_NAME.name: destination.component}

        endpoint = self.endpoints.find(destination.endpoint, values)
        exchange.variant = endpoint.variant
        timeout_s = self.settings.timeout_s
        async with self._invocation(exchange, endpoint, values, timeout_s) as response:
            return response, await response.read()

    @asynccontextmanager
    async def _invocation(
        self,
        exchange: AwsExchange,
        endpoint: AwsEndpoint,
        values: dict[str, str],
        timeout_s: float,
    ) -> AsyncIterator[ContainerResponse]:
        """Yield the model's response. Raises AwsError for an error of the container, or where none
        came in time.
        """
        target = values.get("TargetModel")
        async with (
            self._target_models.path(endpoint, target, exchange.region) as path,
            self._call(exchange, endpoint, values, path, timeout_s) as response,
        ):
            if response.status >= 300:
                text = await _text_of_error(response)
                raise model_error(response.status, text, endpoint.name, exchange.region)

            yield response

    @asynccontextmanager
    async def _call(
        self,
        exchange: AwsExchange,
        endpoint: AwsEndpoint,
        values: dict[str, str],
        path: str,
        timeout_s: float,
    ) -> AsyncIterator[ContainerResponse]:
        """Yield the container's response. Raises AwsError where it does not come whole while the
        block runs.
        """
        adapter = self.endpoints.adapter(endpoint.name, values.get("InferenceComponentName"))
        headers = exchange.headers_for_container(values, endpoint.name, adapter)
        await endpoint.container.check_was_ready()

        try:
            identifier = values.get("PrefixAwareId", "")
            prefix = RequestPrefix(exchange.payload, identifier, is_chat=path == CHAT_PATH)

            with endpoint.container.lease(prefix) as container:
                call = container.call("POST", path, headers, exchange.payload, timeout_s)
                async with call as response:
                    _warn_of_large_head(response)
                    yield response
        except ContainerFault as fault:
            raise endpoint.error(fault, exchange.region) from fault


def _warn_of_large_head(response: ContainerResponse) -> None:
    num_header_bytes = num_bytes(response.headers)
    if num_header_bytes > MAX_HEADER_BYTES:
        log.warning("the container's answer has %d bytes of headers", num_header_bytes)


def _endpoints(settings: GatewaySettings, answers: Answers) -> EndpointTable:
    """Return the endpoints that flags name, or those that clients create."""
    if settings.control_dir is None:
        return NamedEndpoints(settings.endpoints, settings.components)

    # Who does not switch it on does not import it.
    from lmi.gateway.control.http import ControlledEndpoints
    from lmi.gateway.control.plane import Plane

    plane = Plane(
        settings.control_dir,
        settings.buckets,
        settings.images,
        settings.trusts_models,
        settings.max_containers,
        answers,
    )
    return ControlledEndpoints(plane)


def _queue(settings: GatewaySettings) -> AsyncQueue:
    """Return the queue of async invocations, on the disk where there is a folder for it."""
    if settings.async_queue is None and settings.control_dir is not None:
        return AsyncQueue(settings.control_dir / "async")

    return AsyncQueue(settings.async_queue)


ENDPOINT = "/endpoints/(?P<endpoint>[^/]+)"
ROUTER = "/inference-routers/(?P<router>[^/]+)"
COMPONENT = "(/inference-components/(?P<component>[^/]+))?"
# The operations by the path of a POST.
ROUTES = {
    f"{ENDPOINT}/invocations": Gateway.invoke,
    f"{ENDPOINT}/invocations-response-stream": Gateway.stream,
    f"{ENDPOINT}/async-invocations": Gateway.invoke_later,
    f"{ENDPOINT}{COMPONENT}/openai/v1/chat/completions": Gateway.chat,
    f"{ROUTER}/invocations": Gateway.route,
    f"{ROUTER}/async-invocations": Gateway.route_later,
    "/": Gateway.control,
}
# The same over HTTP/2, as on the platform.
HTTP2_ROUTES = {f"{ENDPOINT}/{STREAM_PATH}": Gateway.converse}


Handler = Callable[[Gateway, AwsExchange], Coroutine[Any, Any, None]]


def _find_handler(exchange: AwsExchange) -> Handler | None:
    """Return what answers the path, whose names it notes, or None if nothing does."""
    routes = HTTP2_ROUTES if exchange.is_http2 else ROUTES
    for pattern, handler in routes.items():
        match = re.fullmatch(pattern, exchange.path)
        if match:
            exchange.names = match.groupdict()
            return handler

    return None


async def _text_of_error(response: ContainerResponse) -> str:
    """Return as much of a container's error as its client may see."""
    content = b""
    while len(content) < MAX_ERROR_BYTES:
        chunk = await response.receive()
        if not chunk:
            break

        content += chunk

    return content.decode(errors="replace")


async def _send_acceptance(exchange: AwsExchange, job: AsyncJob) -> None:
    """Send where the answer of an async invocation will be."""
    locations = [
        (PREFIX + "OutputLocation", job.output),
        (PREFIX + "FailureLocation", job.failure),
    ]
    body = orjson.dumps({"InferenceId": job.inference_id})
    await exchange.send_whole(202, "application/json", body, locations)


def headers_for_client(response: ContainerResponse, variant: str) -> list[Header]:
    """Return what a client gets of the container's headers, beside the content type, and the
    variant.
    """
    headers = [(VARIANT_HEADER, variant)]
    for name in PASSED:
        headers.append((PREFIX + name, response.header(PREFIX + name)))

    session = response.header(PREFIX + "Session-Id")
    if "; Expires=" in session and not response.header(PREFIX + "New-Session-Id"):
        headers.append((PREFIX + "New-Session-Id", session))

    return headers


async def _refuse(exchange: AwsExchange, error: LmiError) -> None:
    """Answer with an error. A client whose answer has begun loses its connection, so
    that it knows.
    """
    if exchange.status:
        log.warning("request %s was cut: %s", exchange.request_id, error)
        return

    await exchange.send_error(aws_error(error))
