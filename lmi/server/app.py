"""The ASGI application: the table of routes, and what turns every error into an answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lmi.adapters import routes as adapter_routes
from lmi.apis.anthropic.api import ANTHROPIC
from lmi.apis.base.errors import error_headers
from lmi.apis.table import api_at
from lmi.duplex import paths as duplex
from lmi.errors import (
    ClientGone,
    Draining,
    ForeignPage,
    LmiError,
    Overloaded,
    Unauthorized,
    Unavailable,
    UnknownModel,
    shorten,
)
from lmi.http.buffered import BufferedExchange
from lmi.http.exchange import OUTER, WEBSOCKET, Exchange
from lmi.models import routes as model_routes
from lmi.models.choice import SeveralModels
from lmi.runtime import ServerRuntime
from lmi.server import lines
from lmi.server.access import PROBES, Access, CrossOrigin
from lmi.server.front_end import FrontEnd
from lmi.server.load_report import report_load
from lmi.server.routes import (
    anthropic,
    health,
    invocations,
    kserve,
    openai,
    pages,
    responses,
    tgi,
    tokens,
)
from lmi.server.service import Models, Service
from lmi.sessions.cleaning import kept_clean
from lmi.supervisor.credentials import SharedCredentials
from lmi.user_code import routes as user_code

if TYPE_CHECKING:
    import ssl

    from lmi.tracing import Exporter

Handler = Callable[[Exchange, Service], Awaitable[None]]
ServerHandler = Callable[[Exchange, Models], Awaitable[None]]
# The path, its methods, and what answers it.
Row = tuple[str, list[str], Handler]
ServerRow = tuple[str, list[str], ServerHandler]

log = logging.getLogger(__name__)

# The platform's name of a model, which only the log has.
TARGET_MODEL = "x-amzn-sagemaker-target-model"
# Requests for these are neither counted nor logged.
UNCOUNTED = (*PROBES, "/metrics")
# These errors are told in the words of the API, all others in those of HTTP.
IN_WORDS_OF_THE_API = (
    Unauthorized,
    ForeignPage,
    UnknownModel,
    Overloaded,
)
SERVER_ROUTES: list[ServerRow] = [
    *pages.ROUTES,
    *health.ROUTES,
    *lines.SERVER_ROUTES,
    *duplex.SERVER_ROUTES,
    *model_routes.SERVER_ROUTES,
    *kserve.SERVER_ROUTES,
    *anthropic.SERVER_ROUTES,
    *tgi.SERVER_ROUTES,
]
ROUTES: list[Row] = [
    *invocations.ROUTES,
    *invocations.API_ROUTES,
    *kserve.ROUTES,
    *tgi.ROUTES,
    *tokens.ROUTES,
    *anthropic.ROUTES,
    *responses.ROUTES,
    *adapter_routes.ROUTES,
    *adapter_routes.LORA_ROUTES,
]
USER_CODE_ROUTES: list[Row] = [*user_code.ROUTES, *adapter_routes.ROUTES]


def create_app() -> ASGIApp:
    """Make the application of this front end. Its slot and settings come from the environment."""
    runtime = ServerRuntime.from_environ()
    block = runtime.attach()
    record = block.frontends[int(os.environ["LMI_SLOT"])]
    front_end = FrontEnd(runtime, block, record)

    kind = SeveralModels if runtime.config.multi_model else Models
    models = kind(front_end)
    models.load()

    exporter = exporter_of(front_end)
    credentials = SharedCredentials.from_environ(block.supervisor)
    return build_app(models, exporter, credentials)


def tls_context(config: object, make_default: object) -> ssl.SSLContext:
    """Return the context in which this front end speaks TLS.

    uvicorn calls it with its settings and what would make its own context. Neither is needed.
    """
    record = ServerRuntime.from_environ().attach().supervisor
    credentials = SharedCredentials.from_environ(record)
    assert credentials is not None
    return credentials.serving_context()


def build_app(
    models: Models, exporter: Exporter | None = None, credentials: SharedCredentials | None = None
) -> ASGIApp:
    """Make the application of these models, which run while the server runs. `exporter` takes its
    traces.
    """

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with models.running(), kept_clean(models.services):
            # Loaded objects stay. Without this each full collection would walk through them.
            gc.freeze()
            yield

        if exporter is not None:
            await exporter.close()

    user_code_handlers = {path: handler for path, _, handler in USER_CODE_ROUTES}
    rows = list(SERVER_ROUTES)
    for path, methods, handler in ROUTES:
        rows.append((path, methods, of_model(handler, user_code_handlers.get(path))))

    routes = [Route(path, Endpoint(handler), methods=methods) for path, methods, handler in rows]
    router = Router(routes, lifespan=lifespan, redirect_slashes=False)
    app = ErrorMiddleware(router, models, exporter, credentials)

    origins = models.front_end.config.cors_allowed_origins
    return CrossOrigin(app, origins, app.leave, app.end_requests) if origins else app


def websocket_at(path: str) -> type[asyncio.Protocol] | None:
    """Return the protocol of a WebSocket at this path, None where a client may open none."""
    if not duplex.takes_websocket(path):
        return None

    from lmi.http.websocket import WebSocketProtocol

    return WebSocketProtocol


def exporter_of(front_end: FrontEnd) -> Exporter | None:
    """Return what exports traces, where `option.otlp_traces_endpoint` is given: nothing of it is
    imported elsewhere.
    """
    endpoint = front_end.config.otlp_traces_endpoint
    if endpoint is None:
        return None

    from lmi.tracing import Exporter

    return Exporter(endpoint, front_end.record)


class Endpoint:
    """A handler as an ASGI application. It takes the exchange that ErrorMiddleware made."""

    def __init__(self, handler: ServerHandler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["lmi.exchange"], scope["lmi.models"])


def of_model(engine_handler: Handler, user_code_handler: Handler | None) -> ServerHandler:
    """Return what lets the model of a request answer it: one with engines, or one that is user
    code.
    """

    async def serve(exchange: Exchange, models: Models) -> None:
        service = await models.pick(exchange)
        exchange.model = service.config.model.name
        report_load(exchange, service)

        handler = user_code_handler if service.config.is_user_code else engine_handler
        if handler is None:
            raise HTTPException(404)

        with models.using(service):
            await handler(exchange, service)

    return serve


class ErrorMiddleware:
    """The application around all others. It answers errors that a route raises, in the form of the
    path's API.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        exporter: Exporter | None = None,
        credentials: SharedCredentials | None = None,
    ) -> None:
        self._app = app
        self._models = models
        self._front_end = models.front_end
        self._access = Access(models.front_end.runtime, credentials)
        self._exporter = exporter
        self._open: set[Exchange] = set()
        # Set when this process begins to end.
        self._is_leaving = False
        # What ends the requests that are open when the time of a drain is over.
        self._end: LmiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            from lmi.duplex.socket import open_socket

            await open_socket(scope, receive, send, self)
            return

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        exchange_class = BufferedExchange if self._front_end.config.buffer_streams else Exchange
        exchange = exchange_class(scope, receive, send)
        scope.update({"app": self, "lmi.exchange": exchange, "lmi.models": self._models})
        is_of_client = OUTER not in scope
        if self._exporter is not None and is_of_client:
            # The statistics of the answers, for their spans.
            scope["lmi.answers"] = []

        self._open.add(exchange)
        if anthropic.is_of_anthropic(exchange):
            exchange.id_headers.append(anthropic.REQUEST_ID)

        try:
            await self._pass_on(exchange, receive, send)
        except HTTPException as error:
            await self._refuse_route(exchange, error)
        except ClientGone:
            exchange.status = ClientGone.status
        except LmiError as error:
            exchange.error_label = error.label
            if exchange.refuse is not None:
                await exchange.refuse(error)
            else:
                await self._refuse(exchange, error, error.status, error_headers(error))
        except Exception:
            log.exception("request %s failed in the front end", exchange.request_id)
            if exchange.has_begun:
                # The server cuts the connection, which shows that the answer is incomplete.
                raise

            message = f"internal error, see the log for request {exchange.request_id}"
            await self._refuse(exchange, LmiError(message), LmiError.status, {})
        finally:
            self._open.remove(exchange)
            exchange.hold(0)
            if is_of_client:
                self._finish(exchange)

    async def _pass_on(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Let the routes answer a request that may come here, or the model's code for AWS's
        standards.
        """
        self._access.check(exchange)
        if self._end is not None:
            raise self._end

        service = self._models.only
        async with exchange.deadline(None):
            if WEBSOCKET in exchange.scope:
                from lmi.duplex.conversation import converse

                if self._is_leaving:
                    raise Draining("the server is shutting down")

                await converse(exchange, self._models)
            elif service is not None and service.standards is not None:
                await self._pass_code(exchange, service, receive, send)
            else:
                await self._app(exchange.scope, receive, send)

    async def _refuse_route(self, exchange: Exchange, error: HTTPException) -> None:
        """Answer the error that Starlette raises if no route has the path (404) or the method
        (405).
        """
        hint = openai.why_not_found(exchange.path) if error.status_code == 404 else ""
        message = f"{error.detail}: {exchange.method} {shorten(exchange.path)}{hint}"
        await self._refuse(exchange, LmiError(message), error.status_code, error.headers or {})

    async def _pass_code(
        self, exchange: Exchange, service: Service, receive: Receive, send: Send
    ) -> None:
        """Let the model's code for AWS's standards answer, if it wants the request."""
        from lmi.user_code.standards import door

        if door.takes(exchange, service):
            await door.serve(exchange, service, self)
        else:
            await self._app(exchange.scope, receive, send)

    async def _refuse(
        self, exchange: Exchange, error: LmiError, status: int, headers: Mapping[str, str]
    ) -> None:
        """Answer as the API of the path does."""
        model = self._models.only_model
        api = ANTHROPIC if anthropic.is_of_anthropic(exchange) else api_at(exchange.path, model)
        format = api.default_format(model)
        request_id = exchange.request_id

        if isinstance(error, IN_WORDS_OF_THE_API):
            rendered = api.errors.render(error, format, accepted=False, request_id=request_id)
        else:
            rendered = api.errors.render_status(status, str(error), format, request_id)

        body = api.whole(rendered.media_type, rendered.body)
        await exchange.send_whole(rendered.status, rendered.media_type, body, headers.items())

    def leave(self) -> None:
        """Close the WebSockets on which nothing runs, and the others when that has ended."""
        self._is_leaving = True
        for exchange in self._open:
            socket = exchange.scope.get(WEBSOCKET)
            if socket is not None:
                socket.leave()

    def end_requests(self) -> None:
        """End every open request with an error, because this process ends."""
        limit_s = self._front_end.config.drain_timeout_s
        self._end = Unavailable(
            f"the server shuts down, and the answer took longer than drain_timeout ({limit_s:g} s)"
        )

        for exchange in self._open:
            exchange.end_early(self._end)

    def _finish(self, exchange: Exchange) -> None:
        if exchange.path in UNCOUNTED:
            return

        duration_s = time.monotonic() - exchange.started_s
        record = self._front_end.record
        record.num_requests.add(str(exchange.status))
        if WEBSOCKET not in exchange.scope:
            record.request_duration_s.observe(duration_s)

        target = exchange.headers.get(TARGET_MODEL)
        log_fields = {"target_model": target} if target else {}
        exchange.log_access(duration_s, **log_fields)
        if self._exporter is not None:
            self._exporter.add(exchange, exchange.scope["lmi.answers"])
