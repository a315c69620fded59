"""The pages for people, which hold no secret and ask for the key that requests need, and what
machines read.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from lmi import __version__
from lmi.http.exchange import Exchange
from lmi.server.page_files import FILES, TYPES
from lmi.server.service import Models, Service
from lmi.shared.state import EngineRecord

# What a browser may load for a page: files of this server, and images in the page.
SOURCES = "connect-src 'self'; img-src data:; script-src 'self'; style-src 'self'"
POLICY = f"default-src 'none'; {SOURCES}; base-uri 'none'; frame-ancestors 'none'"
# What an engine says of itself and `/server_info` shows.
ENGINE_FIELDS = (
    "name",
    "device",
    "dtype",
    "kernels",
    "max_sequence_length",
    "max_num_sequences",
    "batch_reason",
    "max_kv_cache_tokens",
)
# The paths of the pages.
LINKS = {
    "playground": "/playground",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/ping",
    "metrics": "/metrics",
}


async def home(exchange: Exchange, models: Models) -> None:
    """Send a browser the playground, and any other client the paths of the pages."""
    if "text/html" in exchange.headers.get("accept", ""):
        await page(exchange, models, name="playground.html")
    else:
        await exchange.send_json(LINKS)


async def page(exchange: Exchange, models: Models, *, name: str = "") -> None:
    """Send a file of the pages, by default that of the path."""
    name = name or exchange.scope["path_params"]["name"]
    if name not in FILES:
        raise HTTPException(404)

    media_type = f"{TYPES[Path(name).suffix]}; charset=utf-8"
    await exchange.send_whole(200, media_type, FILES[name], [("content-security-policy", POLICY)])


async def version(exchange: Exchange, models: Models) -> None:
    """Answer the version of lmi."""
    await exchange.send_json({"version": __version__})


async def openapi(exchange: Exchange, models: Models) -> None:
    """Answer the description of all routes, in OpenAPI's form."""
    from lmi.description.document import document

    await exchange.send_json(document(models.config))


async def scrape(exchange: Exchange, models: Models) -> None:
    """Answer the metrics, in Prometheus' form."""
    from lmi.server import metrics

    if not models.keeps_only_one:
        # This lets the models that have come be loaded here.
        await models.listed()

    await exchange.send_whole(200, metrics.MEDIA_TYPE, metrics.render(models))


async def load(exchange: Exchange, models: Models) -> None:
    """Answer the number of requests that have begun and not ended, at all front ends, in vLLM's
    form.
    """
    front_ends = models.front_end.block.frontends
    num_requests = sum(front_end.num_in_flight for front_end in front_ends)
    await exchange.send_json({"server_load": num_requests})


async def server_info(exchange: Exchange, models: Models) -> None:
    """Answer the settings of the server and of each model, without secrets, under the name that
    others have for it.

    Beside those of a model stands what its engines have made of them.
    """
    if not models.keeps_only_one:
        # This lets the models that have come be loaded here.
        await models.listed()

    settings_of_models = {}
    for name, service in models.services.items():
        settings = public(msgspec.to_builtins(service.config))
        del settings["server"]
        settings["loaded"] = loaded(service)
        settings_of_models[name] = settings

    server = public(msgspec.to_builtins(models.front_end.config))
    answer = {"version": __version__, "server": server, "models": settings_of_models}
    await exchange.send_json(answer)


def loaded(service: Service) -> list[dict[str, object]]:
    """Return what each engine of a model that is here says of itself."""
    if service.engines is None:
        return []

    entries = []
    for slot, connection in service.engines.open.items():
        info = connection.info
        if info is not None:
            entry = {name: getattr(info, name) for name in ENGINE_FIELDS}
            entry["memory"] = memory(service.engines.records[slot])
            entries.append(entry)

    return entries


def memory(engine: EngineRecord) -> dict[str, int] | None:
    """Return the bytes of memory that an engine holds, or None if it does not know."""
    if not engine.weights_bytes:
        return None

    model_bytes = engine.weights_bytes + engine.kv_cache_touched_bytes
    return {
        "weights_bytes": engine.weights_bytes,
        "kv_cache_reserved_bytes": engine.kv_cache_bytes,
        "kv_cache_touched_bytes": engine.kv_cache_touched_bytes,
        "rest_bytes": max(0, engine.process_bytes - model_bytes),
    }


def public(settings: Any) -> Any:
    """Return settings with *** in the place of what may be a secret."""
    from lmi.settings.given import SECRET

    if not isinstance(settings, dict):
        return settings

    censored = {}
    for name, value in settings.items():
        is_secret = value and SECRET.search(name)
        censored[name] = "***" if is_secret else public(value)

    return censored


ROUTES: list[tuple[str, list[str], Callable[[Exchange, Models], Awaitable[None]]]] = [
    ("/", ["GET"], home),
    ("/playground", ["GET"], partial(page, name="playground.html")),
    ("/docs", ["GET"], partial(page, name="docs.html")),
    ("/pages/{name}", ["GET"], page),
    ("/version", ["GET"], version),
    ("/openapi.json", ["GET"], openapi),
    ("/metrics", ["GET"], scrape),
    ("/load", ["GET"], load),
    ("/server_info", ["GET"], server_info),
]
