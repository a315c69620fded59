"""What clients of chats and completions ask beside a generation: the models, and the tokens of a
text.

A body of `/tokenize` is read as that of a completion or of a chat, so its ids are those that
generation would begin with. `/tokenize` and `/detokenize` have vLLM's form,
`/v1/messages/count_tokens` has Anthropic's.
"""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi.apis.base.api import AnyApi
from lmi.apis.base.readers import BodyOutline, boolean
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_COMPLETIONS
from lmi.apis.openai.schema import read_prompt_ids
from lmi.errors import InvalidParameter, UnknownModel, Unsupported, shorten
from lmi.http.exchange import Exchange
from lmi.pipeline import Pipeline, adds_special_tokens
from lmi.server.respond import Inference
from lmi.server.service import Models, Service
from lmi.types import GenerationRequest

NAMES = "return_token_strs"
# The longest text that is tokenized alone.
MAX_TEXT_CHARS = 4 << 20

NOT_HERE = {
    "/v1/audio/": "no audio",
    "/v1/realtime/": "no audio",
    "/v1/images/": "no images as answers",
    "/v1/videos/": "no videos",
    "/v1/moderations/": "no classifier",
    "/v1/rerank/": "no classifier",
    "/v1/score/": "no classifier",
    "/v1/files/": "no kept files",
    "/v1/uploads/": "no kept files",
    "/v1/vector_stores/": "no kept files",
    "/v1/batches/": "no kept files: `lmi run-batch` answers a file of requests",
    "/v1/assistants/": "no kept conversations",
    "/v1/threads/": "no kept conversations",
    "/v1/conversations/": "no kept conversations",
    "/v1/responses/resp_": "no kept responses",
    "/v1/fine_tuning/": "no training",
}
"""What other servers of OpenAI's API have at paths that begin so, and lmi leaves out."""


def why_not_found(path: str) -> str:
    """Return what the error of a path that is not found says besides, or ""."""
    for beginning, reason in NOT_HERE.items():
        if f"{path}/".startswith(beginning):
            return f" (lmi has {reason}: docs/scope.md)"

    if "//" in path or path.endswith("/"):
        return " (a path here has single slashes, and none at its end)"

    return ""


async def models(exchange: Exchange, models: Models) -> None:
    await exchange.send_json({"object": "list", "data": await cards(models)})


async def model(exchange: Exchange, models: Models) -> None:
    await exchange.send_json(await card_of(exchange.scope["path_params"]["model"], models))


async def card_of(name: str, models: Models) -> dict[str, Any]:
    """Return the entry of a model by a name of its. Raises UnknownModel."""
    entries = await cards(models)
    for card in entries:
        if card["id"] == name:
            return card

    only = models.only
    if only is None:
        served = ", ".join(repr(card["id"]) for card in entries) or "none"
        raise UnknownModel(f"no model {shorten(name)} is served here, only {served}")

    # A model may answer to further names, which the list does not have.
    if not only.model.answers_to(name):
        only.check_model(name)

    return _card(only, name)


async def cards(models: Models) -> list[dict[str, Any]]:
    """Return the entries of all models, each under all of its names, and of their adapters."""
    entries = []
    for service in await models.listed_for_engines():
        model = service.config.model
        for name in (model.name, *model.aliases):
            entries.append(_card(service, name))

        if service.adapters is None:
            continue

        for adapter in service.adapters.entries():
            # It is the source that the adapter was loaded from, which `/adapters` tells too.
            root = adapter.src or adapter.path
            entries.append(_card(service, adapter.name) | {"root": root, "parent": model.name})

    return entries


def _card(service: Service, name: str) -> dict[str, Any]:
    # A model is as old as the last change of its folder.
    created_s = Path(service.config.model.path).stat().st_mtime
    return {
        "id": name,
        "object": "model",
        "created": int(created_s),
        "owned_by": "lmi",
        "root": service.config.model.path,
        "parent": None,
        "has_chat_template": service.pipeline is not None and service.pipeline.chats is not None,
    }


async def tokenize(exchange: Exchange, service: Service) -> None:
    assert service.pipeline is not None and service.engines is not None
    with closing(Inference(exchange, service, OPENAI_COMPLETIONS)) as inference:
        message = await inference.read(await inference.receive(), _api_of)
        has_names = boolean(NAMES, message.fields.pop(NAMES, None) or False)
        # Whether calls of tools can be read matters to an answer only.
        any_tools = replace(message.format, tool_calls="text")
        parsed = await inference.parse(replace(message, format=any_tools))
        parsed = await inference.complete(parsed)
        if len(parsed.requests) > 1:
            raise InvalidParameter("prompt", "one prompt", f"{len(parsed.requests)} prompts")

        ids = await _tokenize(service.pipeline, parsed.request)
        engine = await service.engines.ready()

        names = None
        if has_names:
            tokenizer = service.pipeline.tokenizer
            names = [tokenizer.token_name(token_id) for token_id in ids]

        answer = {
            "count": len(ids),
            "max_model_len": engine.max_sequence_length,
            "tokens": ids,
            "token_strs": names,
        }
        await exchange.send_json(answer)


async def _tokenize(pipeline: Pipeline, request: GenerationRequest) -> list[int]:
    """Return the ids of a prompt, of any length up to MAX_TEXT_CHARS. Raises InvalidParameter for a
    longer one.
    """
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)

    _check_countable(request)
    text, forged = await pipeline.text_of(request)
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidParameter(
            "inputs", f"at most {MAX_TEXT_CHARS} characters", f"{len(text)} characters"
        )

    adds_special = adds_special_tokens(request)
    return await pipeline.tokenizer.encode_async(
        text, add_special_tokens=adds_special, forged=forged
    )


def _check_countable(request: GenerationRequest) -> None:
    if request.images:
        raise Unsupported(
            request.images[0].place, "an engine that reads the image knows how many tokens it has"
        )


async def detokenize(exchange: Exchange, service: Service) -> None:
    assert service.pipeline is not None
    with closing(Inference(exchange, service, OPENAI_COMPLETIONS)) as inference:
        message = await inference.read(await inference.receive())
        ids = read_prompt_ids("tokens", message.fields.get("tokens"))
        if not ids:
            raise InvalidParameter("tokens", "a non-empty list of token ids", [])

        # The request is checked as that of a completion is, for the sake of its model.
        prompt = replace(message, fields={"prompt": list(ids)})
        await inference.complete(await inference.parse(prompt))

        tokenizer = service.pipeline.tokenizer
        largest_id = max(ids)
        if largest_id >= tokenizer.vocab_size:
            raise InvalidParameter("tokens", f"ids below {tokenizer.vocab_size}", largest_id)

        text = await asyncio.to_thread(tokenizer.decode, ids)
        await exchange.send_json({"prompt": text})


async def count_tokens(
    exchange: Exchange, service: Service, *, api: AnyApi, kind: str | None = None
) -> None:
    """Answer how many tokens the prompt of a conversation has. `kind` is the `object` of the
    answer, if it has one.
    """
    assert service.pipeline is not None and service.engines is not None
    with closing(Inference(exchange, service, api)) as inference:
        message = await inference.read(await inference.receive())
        parsed = await inference.complete(await inference.parse(message))
        request = parsed.request
        info = await service.engines.ready(request.adapter)
        _check_countable(request)

        _, ids = await service.pipeline.encode(request, info)
        head = {} if kind is None else {"object": kind}
        await exchange.send_json({**head, "input_tokens": len(ids)})


def _api_of(body: bytes, content_type: str | None) -> AnyApi:
    fields = BodyOutline.of(body)
    if fields is not None and fields.has("messages"):
        return OPENAI_CHAT

    return OPENAI_COMPLETIONS


ROUTES = [("/tokenize", ["POST"], tokenize), ("/detokenize", ["POST"], detokenize)]
