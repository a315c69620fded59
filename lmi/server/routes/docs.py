"""`/openapi.json`, and `/docs`, a page that shows it. The page is one file and loads only from this server."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from lmi.http.exchange import Exchange
from lmi.server.models import Models

PAGE = Path(__file__).with_name("docs.html").read_bytes()


def _policy(page: bytes) -> str:
    """Return a policy that lets the page use only its inline script and style, and read only from this server."""
    blocks = {tag: re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL) for tag in (b"script", b"style")}
    script, style = (
        " ".join(f"'sha256-{b64encode(sha256(block).digest()).decode()}'" for block in found)
        for found in blocks.values()
    )
    parts = ("default-src 'none'", "connect-src 'self'", "img-src data:", f"script-src {script}", f"style-src {style}")
    return "; ".join((*parts, "base-uri 'none'"))


POLICY = _policy(PAGE)


async def openapi(exchange: Exchange, models: Models) -> None:
    from lmi.server.openapi import document

    await exchange.send_json(document(models.config))


async def docs(exchange: Exchange, models: Models) -> None:
    await exchange.send_whole(200, "text/html; charset=utf-8", PAGE, [("content-security-policy", POLICY)])


ROUTES = [("/openapi.json", ["GET"], openapi), ("/docs", ["GET"], docs)]
