"""The ASGI application of the gateway: the table of routes, and the answers to errors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from lmi.errors import ClientGone, LmiError, Overloaded
from lmi.gateway.control import control
from lmi.gateway.errors import AwsError, too_large, unavailable
from lmi.gateway.exchange import AwsExchange, AwsRequest
from lmi.gateway.gateway import Gateway
from lmi.gateway.signatures import Signatures
from lmi.http.exchange import BodyTooLarge

Handler = Callable[[Gateway, AwsRequest], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)

ROUTES: list[tuple[str, Handler]] = [  # by the path of a POST
    ("/endpoints/{endpoint}/invocations", Gateway.invoke),
    ("/endpoints/{endpoint}/invocations-response-stream", Gateway.stream),
    ("/endpoints/{endpoint}/async-invocations", Gateway.invoke_later),
    ("/endpoints/{endpoint}/openai/v1/chat/completions", Gateway.chat),
    ("/endpoints/{endpoint}/inference-components/{component}/openai/v1/chat/completions", Gateway.chat),
    ("/", control),
]
LARGE_BODY_BYTES = 6291456  # the bound in AWS's API model; its pages say 25 MB


class App:
    def __init__(self, gateway: Gateway, signatures: Signatures | None = None) -> None:
        self._gateway, self._signatures = gateway, signatures
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
        handler, names = self._find(exchange)
        body = await self._body(exchange)
        if self._signatures is not None:
            self._signatures.check(exchange, body)
        await exchange.run_while_there(handler(self._gateway, AwsRequest(exchange, names, body)))

    def _find(self, exchange: AwsExchange) -> tuple[Handler, dict[str, str]]:
        for pattern, handler in self._routes:
            if exchange.method == "POST" and (found := pattern.fullmatch(exchange.path)):
                return handler, found.groupdict()
        raise AwsError("UnknownOperationException", 404, "The requested operation is not supported by the gateway.")

    async def _body(self, exchange: AwsExchange) -> bytes:
        max_bytes = self._gateway.settings.max_body_bytes
        try:
            body = await exchange.body(max_bytes, self._gateway.body_memory)
        except BodyTooLarge:
            raise too_large(max_bytes) from None
        if len(body) > LARGE_BODY_BYTES:
            log.warning("a body of %d bytes: AWS's API model allows %d", len(body), LARGE_BODY_BYTES)
        return body


async def _refuse(exchange: AwsExchange, error: LmiError) -> None:
    """Answer with an error. A client whose answer has begun loses its connection, so that it knows."""
    if exchange.status:
        log.warning("request %s was cut: %s", exchange.request_id, error)
        return
    if isinstance(error, Overloaded):
        error = unavailable(str(error))
    await exchange.send_error(error if isinstance(error, AwsError) else AwsError("ValidationError", 400, str(error)))
