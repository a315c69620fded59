"""The ASGI application: the table of routes, and the middleware that turns every error into an answer.

Of starlette it uses only the Router. ErrorMiddleware is the ASGI application around it. It answers the errors that a
route raises before its response has started, counts the request and writes the access line.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lmi.apis import api_at
from lmi.engine.client import Engines
from lmi.errors import ClientGone, LmiError, shorten
from lmi.http.exchange import BufferedExchange, Exchange
from lmi.pipeline import Pipeline
from lmi.runtime import Runtime
from lmi.server.routes import batch, docs, health, invocations, kserve, openai, tgi, triton, user_code
from lmi.server.service import Service
from lmi.server.sessions import kept_clean
from lmi.shared.state import Block
from lmi.text.chat_template import ChatTemplate
from lmi.text.tokenizer import Tokenizer
from lmi.user_code.client import UserCodeWorkers

Handler = Callable[[Exchange, Service], Awaitable[None]]
Row = tuple[str, list[str], Handler]  # path, methods

access = logging.getLogger("lmi.access")
log = logging.getLogger(__name__)

PROBES = ("/ping", "/metrics", "/v2/health/live", "/v2/health/ready")  # neither counted nor logged
ROUTES: list[Row] = [
    *health.ROUTES,
    *docs.ROUTES,
    *batch.ROUTES,
    *invocations.ROUTES,
    *triton.ROUTES,
    *kserve.ROUTES,
    *tgi.ROUTES,
    *openai.ROUTES,
]
USER_CODE_ROUTES: list[Row] = [*health.ROUTES, *docs.ROUTES, *batch.ROUTES, *user_code.ROUTES]


def create_app() -> ASGIApp:
    """Make the application of this front end. Its slot and settings come from the environment."""
    runtime = Runtime.from_environ()
    block = runtime.attach()
    config = runtime.config
    record = block.frontends[int(os.environ["LMI_SLOT"])]
    user_code = user_code_workers(runtime, block) if config.user_code is not None else None
    if config.is_user_code:
        return build_app(Service(config, block, record, user_code=user_code, sessions=runtime.sessions()))
    engines = Engines([runtime.engine_socket(i) for i in range(len(block.engines))], block.engines)
    tokenizer = Tokenizer.load(config.model.path)
    template = ChatTemplate.load(config.model.path, tokenizer.special_tokens, config.model.chat_template)
    pipeline = Pipeline(tokenizer, engines, template)
    return build_app(Service(config, block, record, engines, pipeline, user_code, runtime.sessions()))


def user_code_workers(runtime: Runtime, block: Block) -> UserCodeWorkers:
    records = runtime.user_code_records(block)
    return UserCodeWorkers([runtime.user_code_socket(slot) for slot in range(len(records))], records)


def build_app(service: Service) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        for connections in service.connections:
            await connections.start()
        gc.freeze()  # loaded objects stay; without this each full collection would walk through them
        async with kept_clean(service.sessions):
            yield
        for connections in service.connections:
            await connections.close()

    routes = USER_CODE_ROUTES if service.config.is_user_code else ROUTES
    router = Router(
        [Route(path, Endpoint(handler), methods=methods) for path, methods, handler in routes],
        lifespan=lifespan,
        redirect_slashes=False,
    )
    return ErrorMiddleware(router, service)


class Endpoint:
    """A handler as an ASGI application. It takes the exchange that ErrorMiddleware made."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["lmi.exchange"], scope["lmi.service"])


class ErrorMiddleware:
    """The outermost application. It answers errors that a route raises, in the form of the path's API."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        make = BufferedExchange if self._service.config.server.buffer_streams else Exchange
        exchange = make(scope, receive, send)
        scope.update({"app": self, "lmi.exchange": exchange, "lmi.service": self._service})
        if exchange.has_key:
            self._service.report_key()
        try:
            await self._app(scope, receive, send)
        except HTTPException as error:  # starlette's own 404 and 405
            message = f"{error.detail}: {exchange.method} {shorten(exchange.path)}"
            await refuse(exchange, self._service, error.status_code, message, (error.headers or {}).get("Allow"))
        except ClientGone:
            exchange.status = ClientGone.status
        except LmiError as error:
            exchange.error_label = error.label
            await refuse(exchange, self._service, error.status, str(error))
        except Exception:
            log.exception("request %s failed in the front end", exchange.request_id)
            if exchange.has_begun:
                raise  # an answer has begun: the server cuts the connection, which shows that it is incomplete
            await refuse(exchange, self._service, 500, f"internal error, see the log for request {exchange.request_id}")
        finally:
            self._service.body_memory.change(exchange.num_body_bytes, 0)
            self._finish(exchange)
        return None

    def _finish(self, exchange: Exchange) -> None:
        if exchange.path in PROBES:
            return
        duration_s = time.monotonic() - exchange.started_s
        record = self._service.record
        record.num_requests.add(str(exchange.status))
        record.request_duration_s.observe(duration_s)
        access.info(
            "%s %s %d",
            exchange.method,
            exchange.path,
            exchange.status,
            extra={
                "request_id": exchange.request_id,
                "status": exchange.status,
                "duration_ms": round(duration_s * 1000, 1),
                **({"error_label": exchange.error_label} if exchange.error_label else {}),
            },
        )


async def refuse(exchange: Exchange, service: Service, status: int, message: str, allow: str | None = None) -> None:
    model = service.config.model
    api = api_at(exchange.path, model)
    rendered = api.render_status(status, message, api.default_format(model))
    body = api.whole(rendered.media_type, rendered.body)
    headers = [("allow", allow)] if allow else []
    await exchange.send_whole(rendered.status, rendered.media_type, body, headers)
