"""The gateway's process: `lmi gateway`, in the foreground or as a child of the supervisor, until SIGTERM.

Its ASGI application is the table of routes, and the answers to errors.
"""

import asyncio
import logging
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

import orjson
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

import lmi.shared.log
from lmi.errors import BadConfiguration, ClientGone, ForeignPage, LmiError, Overloaded
from lmi.gateway import local_url
from lmi.gateway.command import GatewaySettings
from lmi.gateway.exchange import AwsError, AwsExchange, Signatures, too_large, unavailable
from lmi.gateway.gateway import Gateway, control
from lmi.gateway.stores import NO_BOTO3, S3_SCHEME
from lmi.http.browsers import ANY, check_page, is_loopback
from lmi.http.exchange import BodyTooLarge
from lmi.http.listener import bind
from lmi.http.protocol import GuardedProtocol, Refusal
from lmi.shared import linux
from lmi.shared.log import escape, is_text

FINISH_S = 25  # for requests that are still open at SIGTERM
KEEP_ALIVE_S = 120

Handler = Callable[[Gateway, AwsExchange], Coroutine[Any, Any, None]]

ROUTES: list[tuple[str, Handler]] = [  # by the path of a POST
    ("/endpoints/{endpoint}/invocations", Gateway.invoke),
    ("/endpoints/{endpoint}/invocations-response-stream", Gateway.stream),
    ("/endpoints/{endpoint}/async-invocations", Gateway.invoke_later),
    ("/endpoints/{endpoint}/openai/v1/chat/completions", Gateway.chat),
    ("/endpoints/{endpoint}/inference-components/{component}/openai/v1/chat/completions", Gateway.chat),
    ("/", control),
]
LARGE_BODY_BYTES = 6291456  # the bound in AWS's API model; its pages say 25 MB

log = logging.getLogger(__name__)


class App:
    def __init__(self, gateway: Gateway, signatures: Signatures | None = None) -> None:
        self._gateway, self._signatures = gateway, signatures
        self._hosts = () if is_loopback(gateway.settings.host) else (ANY,)
        self._routes = [(re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path)), handler) for path, handler in ROUTES]

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
            await _refuse(exchange, AwsError("InternalFailure", 500, f"internal error, request {exchange.request_id}"))
        finally:
            self._gateway.body_memory.change(exchange.num_body_bytes, 0)
            if exchange.path != "/ping":
                exchange.log_access(time.monotonic() - exchange.started_s)

    async def _answer(self, exchange: AwsExchange) -> None:
        if exchange.path == "/ping" and exchange.method in ("GET", "HEAD"):
            await exchange.send_whole(200, "", b"")
            return
        if self._signatures is None:  # which no page has
            check_page(exchange, (), self._hosts)
        handler, exchange.names = self._find(exchange)
        max_bytes = self._gateway.settings.max_body_bytes
        try:
            exchange.payload = await exchange.body(max_bytes, self._gateway.body_memory)
        except BodyTooLarge:
            raise too_large(max_bytes) from None
        if (num_bytes := len(exchange.payload)) > LARGE_BODY_BYTES:
            log.warning("a body of %d bytes: AWS's API model allows %d", num_bytes, LARGE_BODY_BYTES)
        if self._signatures is not None:
            self._signatures.check(exchange)
        await exchange.run_while_there(handler(self._gateway, exchange))

    def _find(self, exchange: AwsExchange) -> tuple[Handler, dict[str, str]]:
        for pattern, handler in self._routes:
            if exchange.method == "POST" and (found := pattern.fullmatch(exchange.path)):
                return handler, found.groupdict()
        raise AwsError("UnknownOperationException", 404, "The requested operation is not supported by the gateway.")


async def _refuse(exchange: AwsExchange, error: LmiError) -> None:
    """Answer with an error. A client whose answer has begun loses its connection, so that it knows."""
    if exchange.status:
        log.warning("request %s was cut: %s", exchange.request_id, error)
        return
    if isinstance(error, Overloaded):
        error = unavailable(str(error))
    if isinstance(error, ForeignPage):
        error = AwsError("AccessDeniedException", error.status, str(error))
    await exchange.send_error(error if isinstance(error, AwsError) else AwsError("ValidationError", 400, str(error)))


class AwsProtocol(GuardedProtocol):
    """HTTP/1.1 whose refusals have the form of AWS's API too."""

    def rendered(self, refusal: Refusal) -> tuple[bytes, str]:
        said = str(refusal)
        error = unavailable(said) if refusal.status == 503 else AwsError("ValidationError", refusal.status, said)
        return orjson.dumps(error.members), f"x-amzn-requestid: {uuid.uuid4()}\r\nx-amzn-errortype: {error.kind}\r\n"


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. Raises StartError."""
    lmi.shared.log.setup("gateway", settings.log_level, settings.log_format)
    linux.set_title("lmi-gateway")
    linux.hide_memory()
    if parent := os.environ.get(linux.SUPERVISOR_PID):
        linux.die_with_parent(int(parent), signal.SIGTERM)
    if settings.s3_endpoint is not None:
        os.environ["AWS_ENDPOINT_URL_S3"] = settings.s3_endpoint
    places = [settings.async_output, *settings.models.values()]
    if any(place.startswith(S3_SCHEME) for place in places) and find_spec("boto3") is None:
        raise BadConfiguration(NO_BOTO3)
    gateway = Gateway(settings)
    app = App(gateway, Signatures(os.environ) if settings.checks_signatures else None)
    server = make_server(app, settings)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, server.handle_exit)  # also while the server starts, and when it raises them again
    listener = bind(settings.host, settings.port)
    if not settings.checks_signatures and not is_loopback(settings.host):
        log.warning("%s is no loopback address, and everybody who reaches it is served", settings.host)
    say_ready(settings, listener.getsockname()[1])

    async def serve() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            await gateway.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def make_server(app: App, settings: GatewaySettings) -> uvicorn.Server:
    """Return the server. Its lines about starts and stops appear only with DEBUG."""
    if settings.log_level != "DEBUG":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        http=AwsProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FINISH_S,
    )
    return uvicorn.Server(config)


def say_ready(settings: GatewaySettings, port: int) -> None:
    """Print where the gateway is and how clients find it: text on a terminal, else one JSON object."""
    url = local_url(settings.host, port)
    endpoints = {name or "*": container for name, container in settings.endpoints.items()}
    if not is_text(settings.log_format):
        event = {"event": "ready", "gateway": url, "port": port, "endpoints": endpoints}
        print(orjson.dumps(event).decode(), flush=True)
        return
    rows = "\n".join(f"  endpoint {escape(name)} is {escape(container)}" for name, container in endpoints.items())
    exports = f"  export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}\n  export AWS_ENDPOINT_URL_SAGEMAKER={url}"
    print(f"\nlmi gateway is ready\n{rows}\n\n{exports}\n", flush=True)
