"""The routes of OpenAI's API beside those of generation: the models, and what is not here."""

import asyncio
import os
from typing import Any

from lmi.errors import UnknownModel, shorten
from lmi.http.exchange import Exchange
from lmi.server.service import Models, Service

# What other servers of OpenAI's API have at paths that begin so, and lmi leaves out.
NOT_HERE = {
    "/v1/audio/": "no audio",
    "/v1/realtime/": "no audio",
    "/v1/images/": "no images as answers",
    "/v1/videos/": "no videos",
    "/v1/moderations/": "no classifier",
    "/v1/rerank/": "no classifier",
    "/v1/score/": "no classifier",
    "/v1/files/": "no kept files",
    "/v1/uploads/": "no kept files",
    "/v1/vector_stores/": "no kept files",
    "/v1/batches/": "no kept files: `lmi run-batch` answers a file of requests",
    "/v1/assistants/": "no kept conversations",
    "/v1/threads/": "no kept conversations",
    "/v1/conversations/": "no kept conversations",
    "/v1/responses/resp_": "no kept responses",
    "/v1/fine_tuning/": "no training",
}


def why_not_found(path: str) -> str:
    """Return what the error of a path that is not found says besides, or ""."""
    for beginning, reason in NOT_HERE.items():
        if f"{path}/".startswith(beginning):
            return f" (lmi has {reason}: docs/scope.md)"

    if "//" in path or path.endswith("/"):
        return " (a path here has single slashes, and none at its end)"

    return ""


async def list_models(exchange: Exchange, models: Models) -> None:
    """Answer `/v1/models`."""
    await exchange.send_json({"object": "list", "data": await cards(models)})


async def describe_model(exchange: Exchange, models: Models) -> None:
    """Answer `/v1/models/{model}`."""
    await exchange.send_json(await card_of(exchange.scope["path_params"]["model"], models))


async def card_of(name: str, models: Models) -> dict[str, Any]:
    """Return the entry of the model that has this name. Raises UnknownModel."""
    entries = await cards(models)
    for card in entries:
        if card["id"] == name:
            return card

    only = models.only
    if only is None:
        served = ", ".join(repr(card["id"]) for card in entries) or "none"
        raise UnknownModel(f"no model {shorten(name)} is served here, only {served}")

    # A model may answer to further names, which the list does not have.
    if not only.model.answers_to(name):
        raise UnknownModel(f"no model {shorten(name)} is served here, only {only.served_names}")

    return _card(only, name, await _created_s(only))


async def cards(models: Models) -> list[dict[str, Any]]:
    """Return the entries of all models, each under all of its names, and of their adapters."""
    entries = []
    for service in await models.listed_for_engines():
        model = service.config.model
        created_s = await _created_s(service)
        for name in (model.name, *model.aliases):
            entries.append(_card(service, name, created_s))

        if service.adapters is None:
            continue

        for adapter in service.adapters.entries():
            # It is the source that the adapter was loaded from, which `/adapters` tells too.
            root = adapter.src or adapter.path
            card = _card(service, adapter.name, created_s)
            entries.append(card | {"root": root, "parent": model.name})

    return entries


async def _created_s(service: Service) -> int:
    """Return the time of the last change of a model's folder, 0 where it cannot be read now."""
    try:
        status = await asyncio.to_thread(os.stat, service.config.model.path)
    except OSError:
        return 0

    return int(status.st_mtime)


def _card(service: Service, name: str, created_s: int) -> dict[str, Any]:
    """Return the entry of a model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "lmi",
        "root": service.config.model.path,
        "parent": None,
        "has_chat_template": service.pipeline is not None and service.pipeline.chats is not None,
    }
