"""Triton's generate extension: `/v2/models/{model}[/versions/{version}]/generate` and `/generate_stream`."""

from __future__ import annotations

from dataclasses import replace

from lmi.apis.triton.api import TRITON, TRITON_STREAM
from lmi.errors import UnknownModel
from lmi.http.exchange import Exchange
from lmi.server.respond import serve_request
from lmi.server.service import Service
from lmi.settings.config import ModelConfig


def named_model(exchange: Exchange, service: Service) -> ModelConfig:
    """Return the model under the name that the path has for it. Raises UnknownModel."""
    path = exchange.scope["path_params"]
    try:
        service.check_model(path["model"], path.get("version"))
    except UnknownModel as error:
        raise UnknownModel(f"Request for unknown model: {error}") from None
    return replace(service.config.model, name=path["model"])


async def generate(exchange: Exchange, service: Service) -> None:
    await serve_request(exchange, service, TRITON, named_model(exchange, service))


async def generate_stream(exchange: Exchange, service: Service) -> None:
    await serve_request(exchange, service, TRITON_STREAM, named_model(exchange, service))


ROUTES = [
    (f"/v2/models/{{model}}{version}/{name}", ["POST"], handler)
    for version in ("", "/versions/{version}")
    for name, handler in (("generate", generate), ("generate_stream", generate_stream))
]
