"""The app of a model whose code is for AWS's model-hosting-container-standards: the package's own
handlers and middlewares, and behind them this server.

Only the process of user code imports it, since the package is an extra.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lmi.user_code.standards.calls import Doors
from lmi.user_code.standards.engine_client import EngineClient, NotHere, asking, server_client
from lmi.user_code.standards.settings import (
    HANDLERS,
    INVOCATION,
    MIDDLEWARES,
    PING,
    SCRIPT,
    SCRIPT_FOLDER,
)

# What else the state of vLLM's app holds.
NOT_HERE = (
    "openai_serving_chat",
    "openai_serving_completion",
    "openai_serving_models",
    "openai_serving_tokenization",
    "vllm_config",
)
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
NAMED_ROUTE = re.compile(r"route=(/[^\s,;]+)")
# The paths, methods and names of the handlers that variables may set.
ROUTES = {PING: ("/ping", "GET"), INVOCATION: ("/invocations", "POST")}
FRAMEWORK_NAMES = {"ping": "register_ping_handler", "invoke": "register_invocation_handler"}
# The name of a parameter in a path, as in /adapters/{adapter_name}.
PARAMETER = re.compile(r"\{[^}]*\}")

log = logging.getLogger("lmi.user_code.standards.worker")


def build(script: str, folder: str, *, model_folder: str, name: str) -> tuple[ASGIApp, Doors]:
    """Return the app, and which requests it wants. Raises whatever the code raises as it is loaded.

    `folder` is where the package looks for the file `script`, and for those that variables name.
    """
    os.environ[SCRIPT_FOLDER] = folder
    os.environ[SCRIPT] = os.path.relpath(script, folder)
    with kept_logging():
        from model_hosting_container_standards.common.fastapi.middleware import middleware_registry
        from model_hosting_container_standards.common.handler import handler_registry
        from model_hosting_container_standards.sagemaker import bootstrap
        from model_hosting_container_standards.sagemaker.sagemaker_loader import (
            SageMakerFunctionLoader,
        )
        from model_hosting_container_standards.sagemaker.sagemaker_router import (
            get_sagemaker_route_config,
        )

        app = FastAPI(title=name, docs_url=None, redoc_url=None, openapi_url=None)
        app.state.engine_client = EngineClient(model_folder)
        app.state.client = server_client()
        for absent in NOT_HERE:
            setattr(app.state, absent, NotHere(absent))

        # The package puts it between throttle and pre_post_process, as the engine's own.
        app.add_middleware(NamedRoute)
        _check_middlewares(SageMakerFunctionLoader.get_function_loader())
        bootstrap(app)

    routes = []
    for handler_name in handler_registry.list_handlers():
        route = get_sagemaker_route_config(handler_name)
        if route is not None:
            routes.append((route.method, _pattern_of(route.path)))

    routes += _add_paths_of_variables(app)
    _warn_of_framework_handlers(handler_registry)
    # What no handler answers is the server's.
    app.router.routes.append(Route("/{path:path}", Server()))
    return app, Doors(routes, bool(middleware_registry.list_middlewares()))


@contextmanager
def kept_logging() -> Iterator[None]:
    """Keep the levels of the root logger, which the package sets as it is imported."""
    root = logging.getLogger()
    level = root.level
    levels = [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, handler_level in levels:
            handler.setLevel(handler_level)


def _check_middlewares(loader: Any) -> None:
    """Raise ValueError for a variable whose middleware cannot be loaded. The package would log it
    and serve without.
    """
    for variable in MIDDLEWARES:
        spec = os.environ.get(variable, "").strip()
        if not spec:
            continue

        try:
            function = loader.load_function(spec)
        except Exception as error:
            raise ValueError(f"{variable}={spec}: {error}") from error

        if function is None:
            raise ValueError(f"{variable}={spec}: it must be FILE.py:FUNCTION or MODULE:FUNCTION")


def _pattern_of(path: str) -> str:
    """Return the regular expression of a path with parameters."""
    texts = map(re.escape, PARAMETER.split(path))
    return "[^/]+".join(texts)


def _add_paths_of_variables(app: FastAPI) -> list[tuple[str, str]]:
    """Let the paths that variables name in place of a handler answer. Returns the routes."""
    routes = []
    for variable in HANDLERS:
        spec = os.environ.get(variable, "").strip()
        if not spec.startswith("/") or ":" in spec:
            continue

        path, method = ROUTES[variable]
        app.router.routes.insert(0, Route(path, Server(spec), methods=[method]))
        routes.append((method, path))

    return routes


def _warn_of_framework_handlers(registry: Any) -> None:
    for name in registry.list_framework_defaults():
        decorator = FRAMEWORK_NAMES.get(name, f"register_handler({name!r})")
        log.warning(
            "%s is for an engine's own handler, which the engines here have: its function is not "
            "called",
            decorator,
        )


class Server:
    """Passes a request on to this server, to `path` if that is given, and its answer back."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        path = self._path or scope["path"]
        headers = list(scope["headers"])
        question = await asking(request.method, path, headers, body, scope["query_string"])
        try:
            answer = await question.answer()
            start = {
                "type": "http.response.start",
                "status": answer.status,
                "headers": answer.headers,
            }
            await send(start)
            async for part in answer.parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})

            await send({"type": "http.response.body", "body": b""})
        finally:
            question.close()


class NamedRoute:
    """Sends a request to /invocations to the path that Custom-Attributes name, as AWS's vLLM image
    does: handlers of /invocations do not see it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/invocations":
            attributes = Headers(scope=scope).get(ATTRIBUTES, "")
            match = NAMED_ROUTE.search(attributes)
            if match is not None and match[1] != "/invocations":
                scope = {**scope, "path": match[1], "raw_path": match[1].encode()}

        await self._app(scope, receive, send)
