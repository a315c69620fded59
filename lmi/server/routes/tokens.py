"""`/tokenize` and `/detokenize`: the token ids of a prompt or a chat, and the text of token ids, in vLLM's form.

A body of `/tokenize` is read as that of a completion or of a chat, so its ids are those that generation would begin
with.
"""

from __future__ import annotations

from dataclasses import replace

from lmi.apis.base.api import AnyApi
from lmi.apis.base.outline import BodyOutline
from lmi.apis.base.readers import boolean
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_COMPLETIONS
from lmi.apis.openai.schema import PROMPT_IDS
from lmi.errors import InvalidParameter
from lmi.http.exchange import Exchange
from lmi.server.respond import Inference
from lmi.server.service import Service

ADD_SPECIAL, NAMES = "add_special_tokens", "return_token_strs"


async def tokenize(exchange: Exchange, service: Service) -> None:
    assert service.pipeline is not None and service.engines is not None
    async with Inference(exchange, service, OPENAI_COMPLETIONS, service.model) as inference:
        body = await inference.receive()
        message = await inference.read(body, exchange.headers.get("content-type"), _api_of)
        adds_special = boolean(ADD_SPECIAL, message.fields.pop(ADD_SPECIAL, inference.api is OPENAI_COMPLETIONS))
        has_names = boolean(NAMES, message.fields.pop(NAMES, None) or False)
        any_tools = replace(message.format, tool_calls="text")  # whether calls can be read matters to an answer only
        parsed = await inference.parse(replace(message, format=any_tools))
        if len(parsed.requests) > 1:
            raise InvalidParameter("prompt", "one prompt", f"{len(parsed.requests)} prompts")
        ids = await service.pipeline.tokenize(parsed.request, add_special_tokens=adds_special)
        engine = await service.engines.ready()
        names = [service.pipeline.token_name(token_id) for token_id in ids] if has_names else None
        answer = {"count": len(ids), "max_model_len": engine.max_sequence_length, "tokens": ids, "token_strs": names}
        await exchange.send_json(answer)


async def detokenize(exchange: Exchange, service: Service) -> None:
    assert service.pipeline is not None
    async with Inference(exchange, service, OPENAI_COMPLETIONS, service.model) as inference:
        message = await inference.read(await inference.receive(), exchange.headers.get("content-type"), None)
        ids = PROMPT_IDS("tokens", message.fields.get("tokens"))
        if not ids:
            raise InvalidParameter("tokens", "a non-empty list of token ids", [])
        await inference.parse(replace(message, fields={"prompt": list(ids)}))  # for its model
        await exchange.send_json({"prompt": await service.pipeline.detokenize(ids)})


def _api_of(body: bytes, content_type: str | None) -> AnyApi:
    fields = BodyOutline.of(body)
    return OPENAI_CHAT if fields is not None and fields.has("messages") else OPENAI_COMPLETIONS


ROUTES = [("/tokenize", ["POST"], tokenize), ("/detokenize", ["POST"], detokenize)]
