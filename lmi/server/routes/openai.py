"""`/v1/models`: the list of models of the OpenAI API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmi.errors import UnknownModel, shorten
from lmi.http.exchange import Exchange
from lmi.server.models import Models
from lmi.server.service import Service


async def models(exchange: Exchange, models: Models) -> None:
    cards = [entry for service in await models.listed_for_engines() for entry in cards_of(service)]
    await exchange.send_json({"object": "list", "data": cards})


async def model(exchange: Exchange, models: Models) -> None:
    name, services = exchange.scope["path_params"]["model"], await models.listed_for_engines()
    cards = [entry for service in services for entry in cards_of(service)]
    found = next((entry for entry in cards if entry["id"] == name), None)
    if found is None:
        found = _card(_checked(name, models.only, [entry["id"] for entry in cards]), name)
    await exchange.send_json(found)


def cards_of(service: Service) -> list[dict[str, Any]]:
    """Return the entries of a model, under each of its names, and of its adapters."""
    model = service.config.model
    entries = [] if service.adapters is None else service.adapters.entries()
    adapters = [_card(service, entry.name) | {"parent": model.name} for entry in entries]
    return [*(_card(service, name) for name in (model.name, *model.aliases)), *adapters]


def _checked(name: str, only: Service | None, served: list[str]) -> Service:
    """Return the only model, for a further name of it. Raises UnknownModel."""
    if only is None:
        raise UnknownModel(f"no model {shorten(name)} is served here, only {', '.join(map(repr, served)) or 'none'}")
    only.check_model(name)
    return only


def _card(service: Service, name: str) -> dict[str, Any]:
    """Return the entry of a model. `created` is when its folder was last changed."""
    return {
        "id": name,
        "object": "model",
        "created": int(Path(service.config.model.path).stat().st_mtime),
        "owned_by": "lmi",
        "has_chat_template": service.pipeline is not None and service.pipeline.has_chat_template,
    }


SERVER_ROUTES = [("/v1/models", ["GET"], models), ("/v1/models/{model:path}", ["GET"], model)]
