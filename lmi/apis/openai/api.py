"""OpenAI's chats and completions, at their own paths and at /invocations: their rows, and their
description.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lmi import errors
from lmi.apis.base.api import SSE, TOO_LONG_AT_OPENAI, Api, ErrorRules, Forms, Row
from lmi.apis.base.readers import Message, adapter, json_schema_of
from lmi.apis.openai import chat_formatter, chat_schema, formatter, schema
from lmi.apis.openai.schema import OpenAIFormat
from lmi.description.parts import (
    WAITING,
    ApiDescription,
    Form,
    Schema,
    about_defaults,
    array,
    asked,
    content,
    either,
    or_null,
    struct,
    taken,
)
from lmi.settings.config import Config
from lmi.types import OutputFormat

CHATS = Forms(chat_formatter.ChatWhole, chat_formatter.ChatStream, chat_formatter.ChatLines)
TEXTS = Forms(formatter.CompletionWhole, formatter.CompletionStream, formatter.CompletionLines)
OPENAI_CHAT_ERRORS = ErrorRules(
    CHATS.write_error,
    # Errors whose kind clients look for have OpenAI's kind. The others have our labels.
    (
        Row(errors.Unauthorized, 401, "invalid_api_key"),
        Row(errors.UnknownModel, 404, "model_not_found", param="model"),
        Row(errors.UnknownAdapter, 404, "model_not_found", param="model"),
        Row(errors.PromptTooLong, 400, "context_length_exceeded", opening=TOO_LONG_AT_OPENAI),
        Row(errors.Overloaded, 429, "rate_limit_exceeded"),
        Row(errors.UserCodeFailed, 424),
        Row(errors.GenerationFailed, 500),
    ),
    chat_schema.CHAT.wire_names(),
)
OPENAI_CHAT: Api[OpenAIFormat] = Api(
    name="openai_chat",
    paths=("/v1/chat/completions",),
    prefixes=("/v1/", "/tokenize", "/detokenize"),
    default_format=schema.default_format,
    read=chat_schema.read,
    parse=chat_schema.parse,
    formatter=CHATS.formatter,
    errors=OPENAI_CHAT_ERRORS,
)
OPENAI_COMPLETIONS = replace(
    OPENAI_CHAT,
    name="openai_completions",
    paths=("/v1/completions",),
    read=schema.read,
    parse=schema.parse,
    formatter=TEXTS.formatter,
    errors=replace(OPENAI_CHAT_ERRORS, names=schema.COMPLETION.wire_names()),
)


def _at_invocations(api: Api[OpenAIFormat], body_field: str) -> Api[OpenAIFormat]:
    """Return the API as it is at /invocations: a stream is lines, or events if Accept asks for
    them, unless body or settings say otherwise.
    """
    read_body: Callable[..., Message[OpenAIFormat]] = api.read
    name = f"{api.name}_lines"

    return replace(
        api,
        name=name,
        read=partial(read_body, stream_format=OutputFormat.JSONLINES),
        read_for_events=partial(read_body, stream_format=OutputFormat.SSE),
        paths=(),
        body_field=body_field,
        json_end=b"\n",
    )


OPENAI_CHAT_LINES = _at_invocations(OPENAI_CHAT, "messages")
OPENAI_TEXT_LINES = _at_invocations(OPENAI_COMPLETIONS, "prompt")

# The description, for /openapi.json.
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "say Hello"}], "max_completion_tokens": 8}
EXAMPLE = {"prompt": "What is the capital of France?", "max_tokens": 8, "temperature": 0}
SAYS = either(str, [asked({"type": ("text",), "text": str}, "type", "text")], None)
ROLE: Schema = {
    "type": "string",
    "pattern": f"^{chat_schema.OTHER_ROLE.pattern}$",
    "examples": list(chat_schema.ROLES),
}
MESSAGE_ASKED = asked({"role": ROLE, "content": SAYS, "tool_calls": or_null([dict])}, "role")
MESSAGES = {**array(MESSAGE_ASKED), "minItems": 1}
ABOUT_TOKENS: dict[str, Form] = {
    "model": str | None,
    "tools": or_null([dict]),
    "add_special_tokens": bool,
    "add_generation_prompt": bool,
    "return_token_strs": bool,
}
IDS: Schema = {**json_schema_of(schema.PROMPT_IDS), "minItems": 1}
HEAD_OF_MODEL: dict[str, Form] = {"id": str, "object": {"const": "model"}, "created": int}
TOKENS = (
    errors.InvalidRequest,
    errors.UnknownAdapter,
    errors.UnknownModel,
    errors.GenerationFailed,
)
PROMPT = either(
    {"type": "string", "minLength": 1}, {**array(either(str, int, [int])), "minItems": 1}
)
CACHED = struct(cached_tokens=int)
NUM_TOKENS: dict[str, Form] = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
}
USAGE = struct(**NUM_TOKENS, prompt_tokens_details=CACHED)
USAGE_OF_CHUNK = struct("prompt_tokens_details", **NUM_TOKENS, prompt_tokens_details=CACHED)
TOKEN: dict[str, Form] = {"token": str, "logprob": float | None, "bytes": [int]}
CHAT_LOG_PROBS = or_null(
    struct(content=[struct(**TOKEN, top_logprobs=[struct(**TOKEN)])], refusal=None)
)
LOG_PROBS = or_null(
    struct(
        tokens=[str],
        token_logprobs=[float | None],
        top_logprobs=or_null([dict | None]),
        text_offset=[int],
    )
)
FUNCTION = struct("name", name=str, arguments=str)
CALL = struct(
    "index", "id", "type", index=int, id=str, type={"const": "function"}, function=FUNCTION
)
SAID: dict[str, Form] = {
    "role": {"const": "assistant"},
    "content": str | None,
    "reasoning": str,
    "reasoning_content": str,
    "tool_calls": [CALL],
}
MESSAGE = struct("reasoning", "reasoning_content", "tool_calls", **SAID, refusal=None)
REASON = ("stop", "length", "tool_calls")
OF_PROMPT: dict[str, Form] = {
    "prompt_token_ids": or_null([int]),
    "prompt_logprobs": or_null([dict | None]),
}


def _answer(kind: str, *optional: str, **choice: Form) -> Schema:
    """Describe an answer, or with `optional` fields a chunk of one. Only its last chunk has a
    reason.
    """
    head: dict[str, Form] = {"id": str, "created": int, "model": str, "system_fingerprint": str}
    usage: Form = USAGE
    reason: Form = REASON
    optional_of_client: tuple[str, ...] = ()

    # A chunk leaves out what nobody asked for, where a whole answer has null.
    if optional:
        head |= WAITING
        usage = or_null(USAGE_OF_CHUNK)
        reason = or_null(REASON)
        optional += tuple(WAITING)
        optional_of_client = ("token_ids", *OF_PROMPT)

    # A completion may have several prompts, so its choices have the fields of the prompt.
    choice["finish_reason"] = reason
    if kind.startswith("chat"):
        head |= OF_PROMPT
    else:
        choice |= OF_PROMPT

    choices = [struct(*optional_of_client, index=int, token_ids=or_null([int]), **choice)]
    return struct(
        *optional,
        *optional_of_client,
        **head,
        object={"const": kind},
        choices=choices,
        usage=usage,
    )


ADAPTERS: dict[str, Form] = {
    "adapters": {
        **or_null(json_schema_of(adapter)),
        "description": "the name of a loaded LoRA adapter, before `model`",
    },
}
CHAT_ASKED = taken(chat_schema.CHAT) | {"messages": MESSAGES} | ADAPTERS
TEXT_ASKED = taken(schema.COMPLETION) | {"prompt": PROMPT} | ADAPTERS
SCHEMAS = {
    "OpenAIChatRequest": asked(CHAT_ASKED, "messages", example=CHAT_EXAMPLE),
    "OpenAITextRequest": asked(TEXT_ASKED, "prompt", example=EXAMPLE),
    "OpenAIChat": _answer("chat.completion", message=MESSAGE, logprobs=CHAT_LOG_PROBS),
    "OpenAIChatChunk": _answer(
        "chat.completion.chunk", "usage", delta=struct(*SAID, **SAID), logprobs=CHAT_LOG_PROBS
    ),
    "OpenAIText": _answer("text_completion", text=str, logprobs=LOG_PROBS),
    "OpenAITextChunk": _answer("text_completion", "usage", text=str, logprobs=LOG_PROBS),
    "OpenAIToTokenize": {
        **asked(
            ABOUT_TOKENS | {"prompt": PROMPT, "messages": MESSAGES},
            example={"prompt": "The capital of France"},
        ),
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
    "OpenAITokens": struct(count=int, max_model_len=int, tokens=[int], token_strs=or_null([str])),
    "OpenAIToText": asked(
        {"model": str | None, "tokens": IDS}, "tokens", example={"tokens": [1, 2, 3]}
    ),
    "OpenAIModel": struct(
        **HEAD_OF_MODEL, owned_by=str, root=str, parent=str | None, has_chat_template=bool
    ),
    # This is for the clients of Anthropic's API.
    "AnthropicModel": struct(type={"const": "model"}, id=str, display_name=str, created_at=str),
    "OpenAIError": struct(error=struct(message=str, type=str, param=str | None, code=str | None)),
}


def describe(config: Config) -> ApiDescription:
    about = "OpenAI's API. A stream ends with `[DONE]`." + about_defaults(config.model)
    rules = [OPENAI_CHAT.errors]
    api = ApiDescription("OpenAI", about, config.model, SCHEMAS, content("OpenAIError"), rules)
    for path, summary, kind in (
        ("/v1/chat/completions", "Answer a conversation", "OpenAIChat"),
        ("/v1/completions", "Continue one or more prompts", "OpenAIText"),
    ):
        chunks = content(either(f"{kind}Chunk", "OpenAIError"), SSE, end="[DONE]")
        api.infer(path, summary, content(kind) | chunks, f"{kind}Request")

    api.add(
        "post",
        "/tokenize",
        "The token ids of a prompt or a chat",
        "OpenAITokens",
        TOKENS,
        body="OpenAIToTokenize",
    )
    api.add(
        "post",
        "/detokenize",
        "The text of token ids",
        content(struct(prompt=str)),
        TOKENS,
        body="OpenAIToText",
    )
    openai_models = struct(object={"const": "list"}, data=["OpenAIModel"])
    anthropic_models = struct(
        data=["AnthropicModel"],
        has_more=bool,
        first_id=or_null({"type": "string"}),
        last_id=or_null({"type": "string"}),
    )
    models = content(either(openai_models, anthropic_models))
    api.add("get", "/v1/models", "The model and its names", models)
    model = content(either("OpenAIModel", "AnthropicModel"))
    api.add("get", "/v1/models/{model}", "The model by a name of its", model)
    return api
