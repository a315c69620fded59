"""The routes that return or count tokens and generate nothing: `/tokenize` and `/detokenize` in
vLLM's form, and the counting routes of Anthropic's API and Responses.

The schema of completions or of chats reads a body of `/tokenize`, so its ids are those with which
generation would begin.
"""

import asyncio
from contextlib import closing

from msgspec.structs import replace

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import BodyOutline
from lmi.apis.base.readers import boolean
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_COMPLETIONS
from lmi.apis.openai.schema import read_prompt_ids
from lmi.errors import InvalidParameter, Unsupported
from lmi.http.exchange import Exchange
from lmi.pipeline import Pipeline, adds_special_tokens
from lmi.server.respond import Inference
from lmi.server.service import Service
from lmi.types import GenerationRequest

# The field that asks for the names of tokens too.
NAMES = "return_token_strs"
# The longest text that `/tokenize` takes. It need not fit into the model's context.
MAX_TEXT_CHARS = 4 << 20


async def tokenize(exchange: Exchange, service: Service) -> None:
    """Answer the token ids of a prompt or a chat."""
    assert service.pipeline is not None and service.engines is not None
    with closing(Inference(exchange, service, OPENAI_COMPLETIONS)) as inference:
        message = await inference.read(await inference.receive(), _api_of)
        has_names = boolean(NAMES, message.fields.pop(NAMES, None) or False)
        # No answer is generated, so it does not matter whether calls of tools could be read in it.
        format = replace(message.format, tool_calls="text")
        parsed = await inference.parse(replace(message, format=format))
        parsed = await inference.complete(parsed)
        if len(parsed.requests) > 1:
            raise InvalidParameter("prompt", "one prompt", f"{len(parsed.requests)} prompts")

        ids = await _tokenize(service.pipeline, parsed.request)
        engine = await service.engines.ready()
        # Ids that the body gives follow the rule of a prompt's ids.
        if ids and max(ids) >= engine.vocab_size:
            rule = f"token ids from 0 to {engine.vocab_size - 1}"
            raise InvalidParameter("prompt", rule, max(ids))

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
    """Return the token ids of a prompt.

    Raises InvalidParameter if it has more than MAX_TEXT_CHARS, and Unsupported if it has images.
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
    """Raise Unsupported for a prompt with images, whose tokens only an engine can count."""
    if request.images:
        raise Unsupported(
            request.images[0].place, "an engine that reads the image knows how many tokens it has"
        )


async def detokenize(exchange: Exchange, service: Service) -> None:
    """Answer the text of token ids."""
    assert service.pipeline is not None
    with closing(Inference(exchange, service, OPENAI_COMPLETIONS)) as inference:
        message = await inference.read(await inference.receive())
        ids = read_prompt_ids("tokens", message.fields.get("tokens"))
        if not ids:
            raise InvalidParameter("tokens", "a non-empty list of token ids", [])

        # The rest of the request is checked like that of a completion: its model must be here.
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
    """Return the API whose schema reads a body of `/tokenize`."""
    fields = BodyOutline.of(body)
    if fields is not None and fields.has("messages"):
        return OPENAI_CHAT

    return OPENAI_COMPLETIONS


ROUTES = [("/tokenize", ["POST"], tokenize), ("/detokenize", ["POST"], detokenize)]
