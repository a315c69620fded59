"""The pages for people, `/playground` and `/docs`, with their files, and `/openapi.json`, which both pages read.

They load only from this server. They hold no secret, so they need no key: they ask for the one that requests need.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException

from lmi.http.exchange import Exchange
from lmi.server.models import Models

FILES = {path.name: path.read_bytes() for path in sorted((Path(__file__).parents[1] / "pages").iterdir())}
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
SOURCES = "connect-src 'self'; img-src data:; script-src 'self'; style-src 'self'"
POLICY = f"default-src 'none'; {SOURCES}; base-uri 'none'; frame-ancestors 'none'"
LINKS = {
    "playground": "/playground",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/ping",
    "metrics": "/metrics",
}


async def home(exchange: Exchange, models: Models) -> None:
    if "text/html" in exchange.headers.get("accept", ""):
        await playground(exchange, models)
    else:
        await exchange.send_json(LINKS)


async def playground(exchange: Exchange, models: Models) -> None:
    await _send(exchange, "playground.html")


async def docs(exchange: Exchange, models: Models) -> None:
    await _send(exchange, "docs.html")


async def file(exchange: Exchange, models: Models) -> None:
    await _send(exchange, exchange.scope["path_params"]["name"])


async def _send(exchange: Exchange, name: str) -> None:
    if name not in FILES:
        raise HTTPException(404)
    media_type = f"{TYPES[Path(name).suffix]}; charset=utf-8"
    await exchange.send_whole(200, media_type, FILES[name], [("content-security-policy", POLICY)])


async def openapi(exchange: Exchange, models: Models) -> None:
    from lmi.server.openapi import document

    await exchange.send_json(document(models.config))


ROUTES = [
    ("/", ["GET"], home),
    ("/playground", ["GET"], playground),
    ("/docs", ["GET"], docs),
    ("/pages/{name}", ["GET"], file),
    ("/openapi.json", ["GET"], openapi),
]
