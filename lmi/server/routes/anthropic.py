"""`/v1/messages/count_tokens`: how many tokens a prompt has, which agents ask before they shorten a conversation."""

from __future__ import annotations

from lmi.apis.anthropic.api import COUNT_TOKENS
from lmi.http.exchange import Exchange
from lmi.server.respond import Inference
from lmi.server.service import Service


async def count_tokens(exchange: Exchange, service: Service) -> None:
    assert service.pipeline is not None
    async with Inference(exchange, service, COUNT_TOKENS) as inference:
        parsed = await inference.parse(await inference.read(await inference.receive()))
        await exchange.send_json({"input_tokens": await service.pipeline.count_tokens(parsed.request)})


ROUTES = [("/v1/messages/count_tokens", ["POST"], count_tokens)]
