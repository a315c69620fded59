"""The paths at which a client may open a WebSocket, and what its messages are requests for."""

import re
from functools import cache

from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from lmi.http.exchange import Exchange
from lmi.server.routes import invocations
from lmi.server.service import Models

# SageMaker opens it, unless its client names another path.
STREAM = "/invocations-bidirectional-stream"
# A browser reads a page at the first. OpenAI's own clients open the second, and speak otherwise on
# it: they post where it is refused.
NEVER = ("/", "/v1/responses")


def takes_websocket(path: str) -> bool:
    """Whether a client may open a WebSocket here: where it may also post a prompt."""
    return path == STREAM or any(pattern.fullmatch(path) for pattern in _patterns())


def path_of_requests(path: str) -> str:
    """Return the path that each message is posted to."""
    return "/invocations" if path == STREAM else path


@cache
def _patterns() -> list[re.Pattern[str]]:
    rows = (*invocations.ROUTES, *invocations.API_ROUTES)
    return [compile_path(path)[0] for path, _, _ in rows if path not in NEVER]


async def refuse_plain_request(exchange: Exchange, models: Models) -> None:
    """Answer a client that does not ask for a WebSocket."""
    raise HTTPException(426, "this path is a WebSocket", {"upgrade": "websocket"})


SERVER_ROUTES = [(STREAM, ["GET"], refuse_plain_request)]
