"""The gateway's process: `lmi gateway`, in the foreground or as a child of the supervisor, until
SIGTERM.
"""

import asyncio
import logging
import os
import signal
import ssl
import uuid
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib.util import find_spec
from socket import socket as Listener
from typing import Any

import orjson
import uvicorn
import uvloop

import lmi.shared.log
from lmi.errors import BadConfiguration, cause_line
from lmi.gateway import local_url
from lmi.gateway.application import Gateway
from lmi.gateway.errors import AwsError
from lmi.gateway.settings import GatewaySettings
from lmi.gateway.stores import NO_BOTO3, S3_SCHEME
from lmi.http.browsers import is_loopback
from lmi.http.listener import bind
from lmi.http.protocol import GuardedProtocol
from lmi.http.refusals import Refusal
from lmi.shared import linux, signals
from lmi.shared.log import escape, is_text

# The time for requests that are still open at SIGTERM.
FINISH_S = 25
KEEP_ALIVE_S = 120
KINDS_OF_REFUSALS = {408: "RequestTimeoutException", 503: "ServiceUnavailable"}

log = logging.getLogger(__name__)


class AwsProtocol(GuardedProtocol):
    """HTTP/1.1 whose refusals have the form of AWS's API too."""

    def rendered(self, refusal: Refusal) -> tuple[bytes, str]:
        """Return the body and further lines of the head of a refusal."""
        error = error_of(refusal)
        lines = f"x-amzn-requestid: {uuid.uuid4()}\r\nx-amzn-errortype: {error.kind}\r\n"
        return orjson.dumps(error.members), lines


def error_of(refusal: Refusal) -> AwsError:
    """Return a refusal as an error of AWS's API."""
    kind = KINDS_OF_REFUSALS.get(refusal.status, "ValidationError")
    return AwsError(kind, refusal.status, str(refusal))


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. Raises StartError."""
    lmi.shared.log.setup("gateway", settings.log_level, settings.log_format)
    _prepare_process()
    if settings.s3_endpoint is not None:
        os.environ["AWS_ENDPOINT_URL_S3"] = settings.s3_endpoint

    places = [settings.async_output, *settings.models.values()]
    if any(place.startswith(S3_SCHEME) for place in places) and find_spec("boto3") is None:
        raise BadConfiguration(NO_BOTO3)

    gateway = Gateway(settings)
    server = make_server(gateway, settings)
    # It handles them also while the server starts, and when it raises them again.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, server.handle_exit)

    _check_host(settings)
    listener = bind(settings.host, settings.port)
    http2_listener = None
    if settings.http2_port is not None:
        http2_listener = bind(settings.host, settings.http2_port)

    http2 = _http2(gateway, settings, http2_listener)
    say_ready(settings, listener, http2_listener)

    async def serve() -> None:
        await gateway.start()
        try:
            async with http2:
                await server.serve(sockets=[listener])
        finally:
            await gateway.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())

    return 0


def _http2(
    gateway: Gateway, settings: GatewaySettings, listener: Listener | None
) -> AbstractAsyncContextManager[None]:
    """Return what serves HTTP/2 in its block, if it is asked for. Raises BadConfiguration."""
    if listener is None:
        return nullcontext()

    if find_spec("h2") is None:
        raise BadConfiguration("--http2-port needs h2: pip install 'lmi[aws]'")

    # Who does not ask for it does not import it.
    from lmi.gateway.http2 import serving

    return serving(gateway, listener, _tls(settings))


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Return TLS for HTTP/2, None without a certificate. Raises BadConfiguration for files that are
    none.
    """
    if settings.ssl_certfile is None:
        return None

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        # A key with a password would ask for it at a terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise BadConfiguration(
            f"--ssl-certfile and --ssl-keyfile must be a certificate and its key without a "
            f"password, given {settings.ssl_certfile} and {settings.ssl_keyfile or 'none'}: "
            f"{cause_line(error)}"
        ) from None

    return context


def _prepare_process() -> None:
    """Give this process its title and its signals. A child of the supervisor ends with it."""
    linux.set_title("lmi-gateway")
    linux.hide_memory()
    supervisor_pid = os.environ.get(linux.SUPERVISOR_PID)
    if supervisor_pid:
        signals.ignore_strays()
        linux.die_with_parent(int(supervisor_pid), signal.SIGTERM)
    else:
        signals.ignore_strays(*signals.of_terminal())


def _check_host(settings: GatewaySettings) -> None:
    """Warn of an address that a network reaches, if signatures are not checked. Raises
    BadConfiguration with a control plane, which starts processes for its clients.
    """
    if settings.checks_signatures or is_loopback(settings.host):
        return

    if settings.control_dir is not None:
        raise BadConfiguration(
            f"--host {settings.host} is no loopback address: --control-dir needs "
            f"--check-signatures there"
        )

    log.warning("%s is no loopback address, and everybody who reaches it is served", settings.host)


def make_server(app: Gateway, settings: GatewaySettings) -> uvicorn.Server:
    """Return the server. Its lines about starts and stops appear only with DEBUG."""
    if settings.log_level != "DEBUG":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    options: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": FINISH_S,
    }
    return uvicorn.Server(
        uvicorn.Config(app, http=AwsProtocol, ws="none", lifespan="off", **options)
    )


def say_ready(
    settings: GatewaySettings, listener: Listener, http2_listener: Listener | None
) -> None:
    """Print where the gateway is and how clients find it: text on a terminal, else one
    JSON object.
    """
    port = listener.getsockname()[1]
    url = local_url(settings.host, port)
    http2_url = ""
    if http2_listener is not None:
        scheme = "http" if settings.ssl_certfile is None else "https"
        http2_url = local_url(settings.host, http2_listener.getsockname()[1], scheme)

    endpoints = {name or "*": container for name, container in settings.endpoints.items()}
    if settings.control_dir is not None:
        endpoints = {}

    if not is_text(settings.log_format):
        event = {"event": "ready", "gateway": url, "port": port, "endpoints": endpoints}
        if http2_url:
            event["http2"] = http2_url

        print(orjson.dumps(event).decode(), flush=True)
        return

    rows = []
    if settings.control_dir is not None:
        rows.append(f"  endpoints are what clients create, in {escape(str(settings.control_dir))}")

    for name, container in endpoints.items():
        rows.append(f"  endpoint {escape(name)} is {escape(container)}")

    exports = [
        f"  export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}",
        f"  export AWS_ENDPOINT_URL_SAGEMAKER={url}",
    ]
    if settings.control_dir is not None:
        exports.append(f"  export AWS_ENDPOINT_URL_SAGEMAKER_INFERENCE_ROUTER_RUNTIME={url}")

    if http2_url:
        exports.append(f"  export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME_HTTP2={http2_url}")

    lines = ["lmi gateway is ready", *rows, "", *exports]
    print("\n" + "\n".join(lines) + "\n", flush=True)
