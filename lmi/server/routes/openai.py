"""The routes of OpenAI's API beside those of generation: the models, and what is not here."""

from pathlib import Path
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


async def models(exchange: Exchange, models: Models) -> None:
    """Answer `/v1/models`."""
    await exchange.send_json({"object": "list", "data": await cards(models)})


async def model(exchange: Exchange, models: Models) -> None:
    """Answer `/v1/models/{model}`."""
    await exchange.send_json(await card_of(exchange.scope["path_params"]["model"], models))


async def card_of(name: str, models: Models) -> dict[str, Any]:
    """Return the entry of a model by a name of its. Raises UnknownModel."""
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
        only.check_model(name)

    return _card(only, name)


async def cards(models: Models) -> list[dict[str, Any]]:
    """Return the entries of all models, each under all of its names, and of their adapters."""
    entries = []
    for service in await models.listed_for_engines():
        model = service.config.model
        for name in (model.name, *model.aliases):
            entries.append(_card(service, name))

        if service.adapters is None:
            continue

        for adapter in service.adapters.entries():
            # It is the source that the adapter was loaded from, which `/adapters` tells too.
            root = adapter.src or adapter.path
            entries.append(_card(service, adapter.name) | {"root": root, "parent": model.name})

    return entries


def _card(service: Service, name: str) -> dict[str, Any]:
    """Return the entry of a model under one of its names."""
    # A model is as old as the last change of its folder.
    created_s = Path(service.config.model.path).stat().st_mtime
    return {
        "id": name,
        "object": "model",
        "created": int(created_s),
        "owned_by": "lmi",
        "root": service.config.model.path,
        "parent": None,
        "has_chat_template": service.pipeline is not None and service.pipeline.chats is not None,
    }
