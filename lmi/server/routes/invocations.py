"""The routes that answer prompts: the paths of each API; and `/invocations`, with the paths that do
the same, which takes the bodies of several APIs.

So a client reaches every API even if a platform forwards only this path, as in AWS's containers.
The path decides the format of the answer, the body the schema: a chat is streamed as lines here,
unless the client asks for events. Every answer that is one JSON value ends with a newline, because
clients read these paths by lines.
"""

from dataclasses import replace
from functools import partial

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import BodyOutline, is_text
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
    """Answer `/invocations`, by the API that a `route` in Custom-Attributes names; without one by
    the API whose field the body has, else by that of the model's `inputs`.
    """
    has_lines = are_lines(exchange)
    # Lines are never answered with events.
    accept = "" if has_lines else exchange.headers.get("accept", "")

    route = exchange.attribute("route")
    choose: Choose
    if route is None:
        model = service.config.model
        inputs_api = api_of_inputs(model, gives_embeddings=service.gives_embeddings)
        api = inputs_api.for_accept(accept)
        choose = partial(api_of_body, default=api, accept=accept)
    else:
        api = _api_of_route(route)
        choose = partial(_api_of_header, api=api)

    serve = serve_lines if has_lines else serve_request
    await serve(exchange, service, api, choose=choose)


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """Answer `/predictions/{model}[/{version}]` and `/models/{model}/invoke`."""
    parameters = exchange.scope["path_params"]
    service.check_model(parameters["model"], parameters.get("version"))
    await invocations(exchange, service)


def _api_of_route(route: str) -> AnyApi:
    """Return the API with this path. Raises UnknownRoute."""
    if route not in BY_ROUTE:
        routes = ", ".join(BY_ROUTE)
        raise UnknownRoute(
            f"route must be one of {routes}, given {shorten(route)} ({CUSTOM_ATTRIBUTES})"
        )

    return BY_ROUTE[route]


def _api_of_header(body: bytes, content_type: str | None, *, api: AnyApi) -> AnyApi:
    """Return the API that a header names, whatever the body has."""
    return api


def api_of_body(
    body: bytes, content_type: str | None = None, *, default: AnyApi, accept: str
) -> AnyApi:
    """Return the API whose field the body has, as it is for a client with this `accept`. `inputs`
    counts before other fields; with it, or without any, it is `default`.
    """
    if is_text(content_type) or not _may_have_field(body):
        return default

    fields = BodyOutline.of(body)
    if fields is None or fields.has("inputs"):
        return default

    for field, api in BY_FIELD.items():
        if fields.has(field):
            return api.for_accept(accept)

    return default


def _may_have_field(body: bytes) -> bool:
    """Whether the name of a field that decides the API stands anywhere in the body."""
    return any(b'"%b"' % field.encode() in body for field in BY_FIELD)


ROUTES = [
    ("/invocations", ["POST"], invocations),
    ("/predictions/{model}", ["POST"], invoke_model),
    ("/predictions/{model}/{version}", ["POST"], invoke_model),
    ("/models/{model}/invoke", ["POST"], invoke_model),
]
API_ROUTES = [(path, ["POST"], partial(serve_path, api=api)) for api in ROWS for path in api.paths]
