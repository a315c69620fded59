"""The pages for people, `/playground` and `/docs`, and what machines read: `/openapi.json` and `/metrics`.

The pages load only from this server. They hold no secret, so they need no key: they ask for the one that requests need.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
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


async def openapi(exchange: Exchange, models: Models) -> None:
    from lmi.description.document import document

    await exchange.send_json(document(models.config))


async def scrape(exchange: Exchange, models: Models) -> None:
    from lmi.server import metrics

    if not models.keeps_one:
        await models.refresh()
    await exchange.send_whole(200, metrics.MEDIA_TYPE, metrics.render(models))


ROUTES: list[tuple[str, list[str], Callable[[Exchange, Models], Awaitable[None]]]] = [
    ("/", ["GET"], home),
    ("/playground", ["GET"], partial(page, name="playground.html")),
    ("/docs", ["GET"], partial(page, name="docs.html")),
    ("/pages/{name}", ["GET"], page),
    ("/openapi.json", ["GET"], openapi),
    ("/metrics", ["GET"], scrape),
]
