"""Which of several models a request means.

A path may name it. Else the query's `model_name` does, else `model_name=` in Custom-Attributes, else the `model` of a
body in OpenAI's form, which may be the name of an adapter. A request without any of them means the only loaded model.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmi.apis.base.outline import BodyOutline
from lmi.apis.openai.schema import UNNAMED
from lmi.apis.table import BY_FIELD
from lmi.errors import InvalidRequest
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange, attribute
from lmi.server.front_end import FrontEnd
from lmi.server.service import Service

NAME = "model_name"
OPENAI_PATHS = "/v1/"


def name_outside_of_body(exchange: Exchange) -> str | None:
    """Return the name that path, query or attributes have for the model, or None."""
    if "model" in exchange.scope["path_params"]:
        return str(exchange.scope["path_params"]["model"])
    return exchange.query.get(NAME) or attribute(exchange.headers.get(CUSTOM_ATTRIBUTES, ""), NAME) or None


async def name_in_body(exchange: Exchange, front_end: FrontEnd) -> str | None:
    """Return the `model` of a body in OpenAI's form, or None. The route reads the body again."""
    if exchange.method != "POST":
        return None
    front_end.check_room()  # before the body: a full server reads nothing
    body = await exchange.peek(front_end.config.max_request_size, front_end.body_memory)
    fields = BodyOutline.of(body)
    if fields is None:
        return None
    by_field = not fields.has("inputs") and any(map(fields.has, BY_FIELD))
    is_openai = exchange.path.startswith(OPENAI_PATHS) or by_field
    name = fields.value("model") if is_openai else None
    return None if not isinstance(name, str) or name in ("", "model", *UNNAMED) else name


def with_adapter(services: Iterable[Service], name: str) -> Service | None:
    """Return the model that has a registered adapter of this name."""
    return next((service for service in services if service.adapters and service.adapters.has(name)), None)


def must_name(loaded: Iterable[str]) -> InvalidRequest:
    """Return the error of a request that names no model where none or several are loaded."""
    names = ", ".join(map(repr, sorted(loaded)))
    return InvalidRequest(
        f"the request must name its model ({NAME} in the query or in Custom-Attributes, or a path below /models/NAME): "
        f"{f'loaded are {names}' if names else 'none is loaded'}"
    )
