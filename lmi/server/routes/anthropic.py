"""What Anthropic's clients ask beside a generation: the models in their form, and the tokens of a
conversation.

They ask for the models where OpenAI's clients do, and say by a header who they are.
"""

from datetime import UTC, datetime
from functools import partial
from typing import Any

from lmi.apis.anthropic.api import COUNT_TOKENS
from lmi.http.exchange import Exchange
from lmi.server.routes import openai
from lmi.server.routes.tokens import count_tokens
from lmi.server.service import Models

MODELS = "/v1/models"
MESSAGES = "/v1/messages"
# The header that every client of Anthropic's sends, and the one by which they name a request.
VERSION = "anthropic-version"
REQUEST_ID = "request-id"


def is_of_anthropic(exchange: Exchange) -> bool:
    """Whether the answer goes to a client of Anthropic's, which reads its own headers and forms."""
    if exchange.path.startswith(MODELS):
        return VERSION in exchange.headers

    return exchange.path.startswith(MESSAGES)


async def models(exchange: Exchange, models: Models) -> None:
    """Answer `/v1/models`, to each client in its form."""
    if not is_of_anthropic(exchange):
        await openai.list_models(exchange, models)
        return

    entries = [_entry(card) for card in await openai.cards(models)]
    answer = {
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
    }
    await exchange.send_json(answer)


async def model(exchange: Exchange, models: Models) -> None:
    """Answer `/v1/models/{model}`, to each client in its form."""
    if not is_of_anthropic(exchange):
        await openai.describe_model(exchange, models)
        return

    card = await openai.card_of(exchange.scope["path_params"]["model"], models)
    await exchange.send_json(_entry(card))


def _entry(card: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of OpenAI's list as one of Anthropic's."""
    created = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


SERVER_ROUTES = [(MODELS, ["GET"], models), (f"{MODELS}/{{model:path}}", ["GET"], model)]
ROUTES = [(f"{MESSAGES}/count_tokens", ["POST"], partial(count_tokens, api=COUNT_TOKENS))]
