"""The gateway's process: `lmi gateway`, in the foreground or as a child of the supervisor, until
SIGTERM.

Its ASGI application has the operations that invoke an endpoint.
"""

import asyncio
import logging
import os
import re
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from typing import Any

import orjson
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

import lmi.shared.log
from lmi.errors import BadConfiguration, ClientGone, ForeignPage, LmiError, Overloaded, shorten
from lmi.gateway import eventstream, local_url
from lmi.gateway.async_invocations import NO_BOTO3, S3_SCHEME, AsyncInvocations
from lmi.gateway.command import GatewaySettings
from lmi.gateway.container import ContainerFault, ContainerResponse, OutOfTime
from lmi.gateway.endpoints import OPERATIONS, AwsEndpoint, Endpoints
from lmi.gateway.exchange import (
    PREFIX,
    VARIANT,
    AwsError,
    AwsExchange,
    Signatures,
    model_error,
    too_large,
    unavailable,
)
from lmi.gateway.target_models import ModelStore, TargetModels
from lmi.http.body import BodyMemory
from lmi.http.browsers import ANY, check_page, is_loopback
from lmi.http.exchange import MAX_HEADER_BYTES, BodyTooLarge, Header, num_bytes
from lmi.http.listener import bind
from lmi.http.protocol import GuardedProtocol, Refusal
from lmi.shared import linux
from lmi.shared.log import escape, is_text

FINISH_S = 25  # for requests that are still open at SIGTERM
KEEP_ALIVE_S = 120
LARGE_BODY_BYTES = 6291456  # the bound in AWS's API model; its pages say 25 MB
MAX_BODY_MEMORY = 1 << 30
MAX_ERROR_BYTES = 16 << 10  # that are read of an error, of which a client sees 2048 characters
PASSED = ("Custom-Attributes", "Closed-Session-Id", "New-Session-Id")
ALLOTTED = (
    "Your model primary did not complete sending the inference response in the allotted time."
)
BROKEN = "The connection to your model primary was lost before the inference response was complete."

log = logging.getLogger(__name__)


class Gateway:
    """The ASGI application: the operations, and the answers to errors."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.endpoints = Endpoints(settings.endpoints, settings.components)
        self.num_body_bytes = 0  # of all requests that are open
        self.body_memory = BodyMemory(self, max(MAX_BODY_MEMORY, 4 * settings.max_body_bytes))
        stores = {
            name: ModelStore(source, settings.models_dir)
            for name, source in settings.models.items()
        }
        self._target_models = TargetModels(stores, settings.timeout_s)
        folder = settings.async_input
        place = settings.async_output
        self._async_invocations = AsyncInvocations(folder, place, settings.async_concurrency)
        self._signatures = Signatures(os.environ) if settings.checks_signatures else None
        self._hosts = () if is_loopback(settings.host) else (ANY,)

    async def close(self) -> None:
        """End what has its own tasks, after the last request."""
        await self._target_models.close()
        await self._async_invocations.close()

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
            await _refuse(
                exchange,
                AwsError("InternalFailure", 500, f"internal error, request {exchange.request_id}"),
            )
        finally:
            exchange.hold(0)
            if exchange.path != "/ping":
                exchange.log_access(time.monotonic() - exchange.started_s)

    async def _answer(self, exchange: AwsExchange) -> None:
        if exchange.path == "/ping" and exchange.method in ("GET", "HEAD"):
            await exchange.send_whole(200, "", b"")
            return

        if self._signatures is None:  # which no page has
            check_page(exchange, (), self._hosts)

        matches = [
            (found, each)
            for path, each in ROUTES.items()
            if (found := re.fullmatch(path, exchange.path))
        ]
        if exchange.method != "POST" or not matches:
            raise AwsError(
                "UnknownOperationException",
                404,
                "The requested operation is not supported by the gateway.",
            )

        [(found, handler)] = matches
        exchange.names = found.groupdict()
        signed = None if self._signatures is None else self._signatures.check_head(exchange)
        max_bytes = self.settings.max_body_bytes
        try:
            exchange.payload = await exchange.body(max_bytes, self.body_memory)
        except BodyTooLarge:
            raise too_large(max_bytes) from None

        if (size := len(exchange.payload)) > LARGE_BODY_BYTES:
            log.warning("a body of %d bytes: AWS's API model allows %d", size, LARGE_BODY_BYTES)

        if self._signatures is not None and signed is not None:
            self._signatures.check_body(exchange, signed)

        await exchange.run_while_there(handler(self, exchange))

    async def invoke(self, exchange: AwsExchange) -> None:
        """Send the container's whole response."""
        async with self._invocation(
            exchange, "InvokeEndpoint", self.settings.timeout_s
        ) as response:
            if response.is_chunked:
                log.warning(
                    "the container's answer is chunked: an asynchronous endpoint would refuse it"
                )

            body = await response.read()

        await exchange.send_whole(
            200, response.header("content-type"), body, headers_for_client(response)
        )

    async def stream(self, exchange: AwsExchange) -> None:
        """Send the container's response as an event stream, part by part."""
        timeout_s = self.settings.stream_timeout_s
        async with self._invocation(
            exchange, "InvokeEndpointWithResponseStream", timeout_s
        ) as response:
            headers = [
                *headers_for_client(response),
                (PREFIX + "Content-Type", response.header("content-type")),
            ]
            async with aclosing(self.settings.parts.cut(response)) as parts:
                async for part in parts:
                    if not exchange.status:
                        await exchange.start(200, eventstream.MEDIA_TYPE, headers)

                    await exchange.write(eventstream.part(part))

            fault = response.fault
            is_late = isinstance(response.fault, OutOfTime)
            if not exchange.status:
                if fault is not None and is_late:
                    raise fault

                await exchange.start(200, eventstream.MEDIA_TYPE, headers)

        if fault is not None:
            log.warning("a stream ends with an error: %s", fault)
            said = (
                ("ModelInvocationTimeExceeded", ALLOTTED) if is_late else ("StreamBroken", BROKEN)
            )
            await exchange.write(eventstream.failure(*said))

        await exchange.end()

    async def chat(self, exchange: AwsExchange) -> None:
        """Send what the container's /v1/chat/completions answers: its status and bytes, of errors
        too.
        """
        endpoint = self.endpoints.find(exchange.names["endpoint"])
        values = exchange.values("chat")
        timeout_s = self.settings.stream_timeout_s
        async with self._call(
            exchange, endpoint, values, "/v1/chat/completions", timeout_s
        ) as response:
            headers = [
                ("content-length", response.header("content-length")),
                *headers_for_client(response),
            ]
            await exchange.start(response.status, response.header("content-type"), headers)
            while chunk := await response.receive():
                await exchange.write(chunk)

            if response.fault is not None:
                # the client's connection is cut, which shows that the answer is not whole
                raise response.fault

        await exchange.end()

    async def invoke_later(self, exchange: AwsExchange) -> None:
        """Accept an async invocation, and send where its answer will be."""
        endpoint = self.endpoints.find(exchange.names["endpoint"])
        await endpoint.container.check_was_ready()
        job = self._async_invocations.accept(exchange, endpoint)
        url = self._async_invocations.output.url
        locations = [
            (PREFIX + "OutputLocation", url(job.output)),
            (PREFIX + "FailureLocation", url(job.failure)),
        ]
        body = orjson.dumps({"InferenceId": job.inference_id})
        await exchange.send_whole(202, "application/json", body, locations)

    async def control(self, exchange: AwsExchange) -> None:
        """Answer AWS JSON 1.1: a POST of / that names the operation in X-Amz-Target."""
        target = exchange.headers.get("x-amz-target", "")
        if target not in OPERATIONS:
            raise AwsError(
                "UnknownOperationException", 400, f"The gateway has no operation {shorten(target)}."
            )

        answer = await OPERATIONS[target](self.endpoints, exchange.payload, exchange.region)
        await exchange.send_whole(200, "application/x-amz-json-1.1", orjson.dumps(answer))

    @asynccontextmanager
    async def _invocation(
        self, exchange: AwsExchange, operation: str, timeout_s: float
    ) -> AsyncIterator[ContainerResponse]:
        """Yield the model's response. Raises AwsError for an error of the container, or where none
        came in time.
        """
        endpoint = self.endpoints.find(exchange.names["endpoint"])
        values = exchange.values(operation)
        async with self._target_models.path(
            endpoint, values.get("TargetModel"), exchange.region
        ) as path:
            async with self._call(exchange, endpoint, values, path, timeout_s) as response:
                if response.status >= 300:
                    text = b""
                    while len(text) < MAX_ERROR_BYTES and (chunk := await response.receive()):
                        text += chunk

                    raise model_error(
                        response.status,
                        text.decode(errors="replace"),
                        endpoint.name,
                        exchange.region,
                    )

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
        headers = exchange.headers_for_container(values, adapter)
        await endpoint.container.check_was_ready()
        try:
            async with endpoint.container.call(
                "POST", path, headers, exchange.payload, timeout_s
            ) as response:
                if (found := num_bytes(response.headers)) > MAX_HEADER_BYTES:
                    log.warning("the container's answer has %d bytes of headers", found)

                yield response
        except ContainerFault as fault:
            raise endpoint.error(fault, exchange.region) from fault


ENDPOINT = "/endpoints/(?P<endpoint>[^/]+)"
COMPONENT = "(/inference-components/(?P<component>[^/]+))?"
ROUTES = {  # by the path of a POST
    f"{ENDPOINT}/invocations": Gateway.invoke,
    f"{ENDPOINT}/invocations-response-stream": Gateway.stream,
    f"{ENDPOINT}/async-invocations": Gateway.invoke_later,
    f"{ENDPOINT}{COMPONENT}/openai/v1/chat/completions": Gateway.chat,
    "/": Gateway.control,
}


def headers_for_client(response: ContainerResponse) -> list[Header]:
    """Return what a client gets of the container's headers, beside the content type, and the
    variant.
    """
    headers = [("x-Amzn-Invoked-Production-Variant", VARIANT)]
    headers += [(PREFIX + name, response.header(PREFIX + name)) for name in PASSED]
    created = response.header(PREFIX + "Session-Id")
    if "; Expires=" in created and not response.header(PREFIX + "New-Session-Id"):
        headers.append((PREFIX + "New-Session-Id", created))

    return headers


async def _refuse(exchange: AwsExchange, error: LmiError) -> None:
    """Answer with an error. A client whose answer has begun loses its connection, so
    that it knows.
    """
    if exchange.status:
        log.warning("request %s was cut: %s", exchange.request_id, error)
        return

    if isinstance(error, Overloaded):
        error = unavailable(str(error))

    if isinstance(error, ForeignPage):
        error = AwsError("AccessDeniedException", error.status, str(error))

    await exchange.send_error(
        error if isinstance(error, AwsError) else AwsError("ValidationError", 400, str(error))
    )


class AwsProtocol(GuardedProtocol):
    """HTTP/1.1 whose refusals have the form of AWS's API too."""

    def rendered(self, refusal: Refusal) -> tuple[bytes, str]:
        said = str(refusal)
        error = (
            unavailable(said)
            if refusal.status == 503
            else AwsError("ValidationError", refusal.status, said)
        )
        return orjson.dumps(
            error.members
        ), f"x-amzn-requestid: {uuid.uuid4()}\r\nx-amzn-errortype: {error.kind}\r\n"


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. Raises StartError."""
    lmi.shared.log.setup("gateway", settings.log_level, settings.log_format)
    linux.set_title("lmi-gateway")
    linux.hide_memory()
    parent = os.environ.get(linux.SUPERVISOR_PID)
    linux.ignore_strays(*(() if parent else linux.of_terminal()))
    if parent:
        linux.die_with_parent(int(parent), signal.SIGTERM)

    if settings.s3_endpoint is not None:
        os.environ["AWS_ENDPOINT_URL_S3"] = settings.s3_endpoint

    places = [settings.async_output, *settings.models.values()]
    if any(place.startswith(S3_SCHEME) for place in places) and find_spec("boto3") is None:
        raise BadConfiguration(NO_BOTO3)

    gateway = Gateway(settings)
    server = make_server(gateway, settings)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            signum, server.handle_exit
        )  # also while the server starts, and when it raises them again

    listener = bind(settings.host, settings.port)
    if not settings.checks_signatures and not is_loopback(settings.host):
        log.warning(
            "%s is no loopback address, and everybody who reaches it is served", settings.host
        )

    say_ready(settings, listener.getsockname()[1])

    async def serve() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            await gateway.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())

    return 0


def make_server(app: Gateway, settings: GatewaySettings) -> uvicorn.Server:
    """Return the server. Its lines about starts and stops appear only with DEBUG."""
    if settings.log_level != "DEBUG":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    options: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    options |= {"timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": FINISH_S}
    return uvicorn.Server(
        uvicorn.Config(app, http=AwsProtocol, ws="none", lifespan="off", **options)
    )


def say_ready(settings: GatewaySettings, port: int) -> None:
    """Print where the gateway is and how clients find it: text on a terminal, else one
    JSON object.
    """
    url = local_url(settings.host, port)
    endpoints = {name or "*": container for name, container in settings.endpoints.items()}
    if not is_text(settings.log_format):
        event = {"event": "ready", "gateway": url, "port": port, "endpoints": endpoints}
        print(orjson.dumps(event).decode(), flush=True)
        return

    rows = "\n".join(
        f"  endpoint {escape(name)} is {escape(container)}" for name, container in endpoints.items()
    )
    exports = (
        f"  export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}\n  export "
        f"AWS_ENDPOINT_URL_SAGEMAKER={url}"
    )
    print(f"\nlmi gateway is ready\n{rows}\n\n{exports}\n", flush=True)
