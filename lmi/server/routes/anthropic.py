"""`/v1/messages/count_tokens`: how many tokens a prompt has, which agents ask before they shorten a conversation."""

from __future__ import annotations

from lmi.apis.anthropic.api import COUNT_TOKENS
from lmi.errors import ClientGone, LmiError
from lmi.http.exchange import Exchange
from lmi.server.respond import Inference
from lmi.server.service import Service


async def count_tokens(exchange: Exchange, service: Service) -> None:
    inference = Inference(exchange, service, COUNT_TOKENS, service.model)
    assert service.pipeline is not None
    try:
        body = await inference.receive()
        message = await inference.read(body, exchange.headers.get("content-type"), None)
        parsed = await inference.parse(message)
        num_tokens = await service.pipeline.count_tokens(parsed.request)
        await exchange.send_json({"input_tokens": num_tokens})
    except ClientGone:
        raise
    except LmiError as error:
        await inference.refuse(error)
    finally:
        inference.close()


ROUTES = [("/v1/messages/count_tokens", ["POST"], count_tokens)]
