"""The paths of every API, and `/invocations`, with the paths that do the same, for the bodies of
several APIs.

So a client reaches every API even if a platform forwards only this path, as in AWS's containers.
The path decides the format of the answer, the body the schema: a chat is streamed as lines here,
unless the client asks for events. Every answer that is one JSON value ends with a newline, because
clients read these paths by lines.
"""

from dataclasses import replace
from functools import partial

from lmi.apis.base.api import AnyApi
from lmi.apis.base.readers import BodyOutline, is_text
from lmi.apis.table import BY_FIELD, BY_ROUTE, ROWS, api_of_inputs
from lmi.errors import LmiError, UnknownModel, shorten
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.server.lines import are_lines, serve_lines
from lmi.server.respond import Choose, serve_request
from lmi.server.service import Service
from lmi.settings.config import ModelConfig


class UnknownRoute(LmiError, label="unknown_route", status=404):
    """Custom-Attributes name a route that is not an inference route."""


async def serve_path(exchange: Exchange, service: Service, *, api: AnyApi) -> None:
    """Answer a path of one API, which may name the model."""
    await serve_request(exchange, service, api, named_model(exchange, service))


def named_model(exchange: Exchange, service: Service) -> ModelConfig:
    """Return the model under the name that the path has for it, if it has one. Raises
    UnknownModel.
    """
    path = exchange.scope["path_params"]
    if "model" not in path:
        return service.model

    try:
        service.check_model(path["model"], path.get("version"))
    except UnknownModel as error:
        raise UnknownModel(f"Request for unknown model: {error}") from None

    return replace(service.model, name=path["model"])


async def invocations(exchange: Exchange, service: Service) -> None:
    route = exchange.attribute("route")
    has_lines = are_lines(exchange)
    accept = (
        "" if has_lines else exchange.headers.get("accept", "")
    )  # lines are never answered with events
    usual = api_of_inputs(service.config.model, gives_embeddings=service.gives_embeddings)
    api = usual.for_accept(accept) if route is None else api_of_route(route)
    choose: Choose = (
        partial(api_of_body, usual=api, accept=accept) if route is None else lambda body, kind: api
    )
    serve = serve_lines if has_lines else serve_request
    await serve(exchange, service, api, choose=choose)


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """Answer `/predictions/{model}[/{version}]` and `/models/{model}/invoke`."""
    named = exchange.scope["path_params"]
    service.check_model(named["model"], named.get("version"))
    await invocations(exchange, service)


def api_of_route(route: str) -> AnyApi:
    if route not in BY_ROUTE:
        known = ", ".join(BY_ROUTE)
        raise UnknownRoute(
            f"route must be one of {known}, given {shorten(route)} ({CUSTOM_ATTRIBUTES})"
        )

    return BY_ROUTE[route]


def api_of_body(
    body: bytes, content_type: str | None = None, *, usual: AnyApi, accept: str
) -> AnyApi:
    """Return the API whose field the body has, `inputs` before others. Without such a field it is
    `usual`.
    """
    if is_text(content_type) or not any(b'"%b"' % field.encode() in body for field in BY_FIELD):
        return usual

    fields = BodyOutline.of(body)
    if fields is None or fields.has("inputs"):
        return usual

    return next(
        (api.for_accept(accept) for field, api in BY_FIELD.items() if fields.has(field)), usual
    )


ROUTES = [
    ("/invocations", ["POST"], invocations),
    ("/predictions/{model}", ["POST"], invoke_model),
    ("/predictions/{model}/{version}", ["POST"], invoke_model),
    ("/models/{model}/invoke", ["POST"], invoke_model),
]
API_ROUTES = [(path, ["POST"], partial(serve_path, api=api)) for api in ROWS for path in api.paths]
