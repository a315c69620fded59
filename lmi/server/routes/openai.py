"""The OpenAI API: `/v1/chat/completions`, `/v1/completions`, and the list of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from lmi.apis import OPENAI_CHAT, OPENAI_COMPLETIONS
from lmi.errors import UnknownModel
from lmi.http.exchange import Exchange
from lmi.server.respond import serve_request
from lmi.server.service import Service
from lmi.settings.config import ModelConfig


async def chat(exchange: Exchange, service: Service) -> None:
    await serve_request(exchange, service, OPENAI_CHAT)


async def completions(exchange: Exchange, service: Service) -> None:
    await serve_request(exchange, service, OPENAI_COMPLETIONS)


async def models(exchange: Exchange, service: Service) -> None:
    model = service.config.model
    cards = [card(model, name) for name in (model.name, *model.aliases)]
    cards += [card(model, name) | {"parent": model.name} for name in registered(service)]
    await exchange.send_whole(200, "application/json", orjson.dumps({"object": "list", "data": cards}))


async def model(exchange: Exchange, service: Service) -> None:
    name = exchange.scope["path_params"]["model"]
    parent = {"parent": service.config.model.name} if name in registered(service) else {}
    try:
        if not parent:
            service.check_model(name)
    except UnknownModel as error:
        exchange.error_label = error.label
        usual = OPENAI_CHAT.default_format(service.config.model)
        rendered = OPENAI_CHAT.render_error(error, usual, accepted=False)
        await exchange.send_whole(rendered.status, rendered.media_type, rendered.body)
        return
    await exchange.send_whole(200, "application/json", orjson.dumps(card(service.config.model, name) | parent))


def registered(service: Service) -> list[str]:
    """Return the names of the adapters that requests may give as their model."""
    return [] if service.adapters is None else [entry.name for entry in service.adapters.entries()]


def card(model: ModelConfig, name: str) -> dict[str, Any]:
    """Return the entry of a model. `created` is when its folder was last changed."""
    return {"id": name, "object": "model", "created": int(Path(model.path).stat().st_mtime), "owned_by": "lmi"}


ROUTES = [
    ("/v1/chat/completions", ["POST"], chat),
    ("/v1/completions", ["POST"], completions),
    ("/v1/models", ["GET"], models),
    ("/v1/models/{model:path}", ["GET"], model),
]
