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
    answer_object,
    array,
    content,
    either,
    or_null,
    request_object,
    table_schemas,
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
SAYS = either(
    str,
    [
        request_object(
            {"type": ("text",), "text": str},
            required=("type", "text"),
        )
    ],
    None,
)
ROLE: Schema = {
    "type": "string",
    "pattern": f"^{chat_schema.OTHER_ROLE.pattern}$",
    "examples": list(chat_schema.ROLES),
}
MESSAGE_ASKED = request_object(
    {"role": ROLE, "content": SAYS, "tool_calls": or_null([dict])}, required=("role",)
)
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
CACHED = answer_object(cached_tokens=int)
NUM_TOKENS: dict[str, Form] = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
}
USAGE = answer_object(**NUM_TOKENS, prompt_tokens_details=CACHED)
USAGE_OF_CHUNK = answer_object(
    optional=("prompt_tokens_details",), **NUM_TOKENS, prompt_tokens_details=CACHED
)
TOKEN: dict[str, Form] = {"token": str, "logprob": float | None, "bytes": [int]}
CHAT_LOG_PROBS = or_null(
    answer_object(
        content=[answer_object(**TOKEN, top_logprobs=[answer_object(**TOKEN)])], refusal=None
    )
)
LOG_PROBS = or_null(
    answer_object(
        tokens=[str],
        token_logprobs=[float | None],
        top_logprobs=or_null([dict | None]),
        text_offset=[int],
    )
)
FUNCTION = answer_object(optional=("name",), name=str, arguments=str)
CALL = answer_object(
    optional=("index", "id", "type"),
    index=int,
    id=str,
    type={"const": "function"},
    function=FUNCTION,
)
SAID: dict[str, Form] = {
    "role": {"const": "assistant"},
    "content": str | None,
    "reasoning": str,
    "reasoning_content": str,
    "tool_calls": [CALL],
}
MESSAGE = answer_object(
    optional=("reasoning", "reasoning_content", "tool_calls"),
    **SAID,
    refusal=None,
)
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

    choices = [
        answer_object(optional=optional_of_client, index=int, token_ids=or_null([int]), **choice)
    ]
    return answer_object(
        optional=(*optional, *optional_of_client),
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
CHAT_ASKED = table_schemas(chat_schema.CHAT) | {"messages": MESSAGES} | ADAPTERS
TEXT_ASKED = table_schemas(schema.COMPLETION) | {"prompt": PROMPT} | ADAPTERS
SCHEMAS = {
    "OpenAIChatRequest": request_object(CHAT_ASKED, required=("messages",), example=CHAT_EXAMPLE),
    "OpenAITextRequest": request_object(TEXT_ASKED, required=("prompt",), example=EXAMPLE),
    "OpenAIChat": _answer("chat.completion", message=MESSAGE, logprobs=CHAT_LOG_PROBS),
    "OpenAIChatChunk": _answer(
        "chat.completion.chunk",
        "usage",
        delta=answer_object(optional=SAID, **SAID),
        logprobs=CHAT_LOG_PROBS,
    ),
    "OpenAIText": _answer("text_completion", text=str, logprobs=LOG_PROBS),
    "OpenAITextChunk": _answer("text_completion", "usage", text=str, logprobs=LOG_PROBS),
    "OpenAIToTokenize": {
        **request_object(
            ABOUT_TOKENS | {"prompt": PROMPT, "messages": MESSAGES},
            example={"prompt": "The capital of France"},
        ),
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
    "OpenAITokens": answer_object(
        count=int, max_model_len=int, tokens=[int], token_strs=or_null([str])
    ),
    "OpenAIToText": request_object(
        {"model": str | None, "tokens": IDS}, required=("tokens",), example={"tokens": [1, 2, 3]}
    ),
    "OpenAIModel": answer_object(
        **HEAD_OF_MODEL, owned_by=str, root=str, parent=str | None, has_chat_template=bool
    ),
    # This is for the clients of Anthropic's API.
    "AnthropicModel": answer_object(
        type={"const": "model"}, id=str, display_name=str, created_at=str
    ),
    "OpenAIError": answer_object(
        error=answer_object(message=str, type=str, param=str | None, code=str | None)
    ),
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
        content(answer_object(prompt=str)),
        TOKENS,
        body="OpenAIToText",
    )
    openai_models = answer_object(object={"const": "list"}, data=["OpenAIModel"])
    anthropic_models = answer_object(
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
