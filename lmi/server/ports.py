"""Which requests belong to the management port, where there is one, and which to the other."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException

from lmi.http.exchange import Exchange
from lmi.server.keys import PROBES

MANAGEMENT = re.compile(r"/metrics|/docs|/load|/server_info|/v1/(un)?load_lora_adapter|(/models/[^/]+)?/adapters(/.*)?")
CHANGES_MODELS = re.compile(r"POST /models|DELETE /models/[^/]+")
# /docs and the playground both read the description.
ANYWHERE = re.compile("|".join(map(re.escape, PROBES)) + r"|/version|/pages/.*|/openapi\.json")


def check_port(exchange: Exchange, management_port: int | None) -> None:
    """Raise HTTPException for a request that came to the wrong port. Both ports tell whether the server serves."""
    if management_port is None or ANYWHERE.fullmatch(exchange.path):
        return
    asked = f"{exchange.method} {exchange.path}"
    is_management = MANAGEMENT.fullmatch(exchange.path) is not None or CHANGES_MODELS.fullmatch(asked) is not None
    if is_management != (exchange.scope["server"][1] == management_port):
        raise HTTPException(404)
