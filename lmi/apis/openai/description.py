"""OpenAI's API in /openapi.json: the schemas of its requests and answers, and its routes."""

from collections.abc import Mapping

from lmi import errors
from lmi.apis.base.media_types import SSE
from lmi.apis.base.readers import adapter, json_schema_of
from lmi.apis.openai import chat_schema, schema
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.apis.openai.chat_messages import OTHER_ROLE, ROLES
from lmi.description.operations import ApiDescription, about_defaults
from lmi.description.schemas import (
    WAITING,
    Form,
    Schema,
    answer_object,
    array,
    content,
    either,
    or_null,
    request_object,
    table_schemas,
)
from lmi.settings.config import Config

Fields = Mapping[str, Form]

# Requests.
TEXT_PART = request_object({"type": ("text",), "text": str}, required=("type", "text"))
ROLE: Schema = {
    "type": "string",
    "pattern": f"^{OTHER_ROLE.pattern}$",
    "examples": list(ROLES),
}
MESSAGE_OF_REQUEST = request_object(
    {
        "role": ROLE,
        "content": either(str, [TEXT_PART], None),
        "tool_calls": or_null([dict]),
    },
    required=("role",),
)
MESSAGES = {**array(MESSAGE_OF_REQUEST), "minItems": 1}
PROMPT = either(
    {"type": "string", "minLength": 1},
    {**array(either(str, int, [int])), "minItems": 1},
)
ADAPTERS: dict[str, Form] = {
    "adapters": {
        **or_null(json_schema_of(adapter)),
        "description": "the name of a loaded LoRA adapter, before `model`",
    },
}
FIELDS_OF_CHAT = table_schemas(chat_schema.CHAT) | {"messages": MESSAGES} | ADAPTERS
FIELDS_OF_TEXT = table_schemas(schema.COMPLETION) | {"prompt": PROMPT} | ADAPTERS
FIELDS_TO_TOKENIZE: dict[str, Form] = {
    "model": str | None,
    "tools": or_null([dict]),
    "add_special_tokens": bool,
    "add_generation_prompt": bool,
    "return_token_strs": bool,
    "prompt": PROMPT,
    "messages": MESSAGES,
}
TOKEN_IDS: Schema = {**json_schema_of(schema.read_prompt_ids), "minItems": 1}
EXAMPLE_OF_CHAT = {
    "messages": [{"role": "user", "content": "say Hello"}],
    "max_completion_tokens": 8,
}
EXAMPLE_OF_TEXT = {
    "prompt": "What is the capital of France?",
    "max_tokens": 8,
    "temperature": 0,
}

# Answers.
HEAD_OF_ANSWER: Fields = {
    "id": str,
    "created": int,
    "model": str,
    "system_fingerprint": str,
}
HEAD_OF_MODEL: Fields = {
    "id": str,
    "object": {"const": "model"},
    "created": int,
}
FINISH_REASONS = ("stop", "length", "tool_calls")
CACHED_TOKENS = answer_object({"cached_tokens": int})
NUMBERS_OF_TOKENS: Fields = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
}
USAGE = answer_object({**NUMBERS_OF_TOKENS, "prompt_tokens_details": CACHED_TOKENS})
USAGE_OF_CHUNK = answer_object(
    {**NUMBERS_OF_TOKENS, "prompt_tokens_details": CACHED_TOKENS},
    optional=("prompt_tokens_details",),
)
# What an answer says of its prompt, if the client asks for it.
PROMPT_FIELDS: Fields = {
    "prompt_token_ids": or_null([int]),
    "prompt_logprobs": or_null([dict | None]),
}
LIKELY_TOKEN: Fields = {
    "token": str,
    "logprob": float | None,
    "bytes": [int],
}
TOKEN_OF_CHAT = answer_object({**LIKELY_TOKEN, "top_logprobs": [answer_object(LIKELY_TOKEN)]})
LOG_PROBS_OF_CHAT = or_null(answer_object({"content": [TOKEN_OF_CHAT], "refusal": None}))
LOG_PROBS_OF_TEXT = or_null(
    answer_object(
        {
            "tokens": [str],
            "token_logprobs": [float | None],
            "top_logprobs": or_null([dict | None]),
            "text_offset": [int],
        }
    )
)
TOOL_CALL = answer_object(
    {
        "index": int,
        "id": str,
        "type": {"const": "function"},
        "function": answer_object({"name": str, "arguments": str}, optional=("name",)),
    },
    optional=("index", "id", "type"),
)
# What a message has, and what a chunk adds to it.
FIELDS_OF_MESSAGE: Fields = {
    "role": {"const": "assistant"},
    "content": str | None,
    "reasoning": str,
    "reasoning_content": str,
    "tool_calls": [TOOL_CALL],
}
MESSAGE_OF_ANSWER = answer_object(
    {**FIELDS_OF_MESSAGE, "refusal": None},
    optional=("reasoning", "reasoning_content", "tool_calls"),
)
DELTA = answer_object(FIELDS_OF_MESSAGE, optional=FIELDS_OF_MESSAGE)


def _answer(kind: str, of_choice: Fields, *, is_chat: bool, is_chunk: bool = False) -> Schema:
    """Describe a whole answer, or a chunk of one.

    `kind` is the value of its field `object`. `of_choice` is what its choices have beside the
    fields of every choice.
    """
    finish_reason: Form = FINISH_REASONS
    usage: Form = USAGE
    waiting: Fields = {}
    optional: tuple[str, ...] = ()
    optional_of_choice: tuple[str, ...] = ()

    # A chunk leaves out what nobody asked for, where a whole answer has null. Only the last chunk
    # has a finish_reason and the usage.
    if is_chunk:
        finish_reason = or_null(FINISH_REASONS)
        usage = or_null(USAGE_OF_CHUNK)
        waiting = WAITING
        optional = ("usage", *WAITING, *PROMPT_FIELDS)
        optional_of_choice = ("token_ids", *PROMPT_FIELDS)

    answer = {**HEAD_OF_ANSWER, **waiting}
    choice = {
        "index": int,
        "token_ids": or_null([int]),
        **of_choice,
        "finish_reason": finish_reason,
    }

    # A completion may have several prompts, so each of its choices says what its prompt is.
    if is_chat:
        answer |= PROMPT_FIELDS
    else:
        choice |= PROMPT_FIELDS

    return answer_object(
        {
            **answer,
            "object": {"const": kind},
            "choices": [answer_object(choice, optional=optional_of_choice)],
            "usage": usage,
        },
        optional=optional,
    )


CHOICE_OF_CHAT: Fields = {"message": MESSAGE_OF_ANSWER, "logprobs": LOG_PROBS_OF_CHAT}
CHOICE_OF_CHAT_CHUNK: Fields = {"delta": DELTA, "logprobs": LOG_PROBS_OF_CHAT}
CHOICE_OF_TEXT: Fields = {"text": str, "logprobs": LOG_PROBS_OF_TEXT}
SCHEMAS = {
    "OpenAIChatRequest": request_object(
        FIELDS_OF_CHAT, required=("messages",), example=EXAMPLE_OF_CHAT
    ),
    "OpenAITextRequest": request_object(
        FIELDS_OF_TEXT, required=("prompt",), example=EXAMPLE_OF_TEXT
    ),
    "OpenAIChat": _answer("chat.completion", CHOICE_OF_CHAT, is_chat=True),
    "OpenAIChatChunk": _answer(
        "chat.completion.chunk", CHOICE_OF_CHAT_CHUNK, is_chat=True, is_chunk=True
    ),
    "OpenAIText": _answer("text_completion", CHOICE_OF_TEXT, is_chat=False),
    "OpenAITextChunk": _answer("text_completion", CHOICE_OF_TEXT, is_chat=False, is_chunk=True),
    "OpenAIToTokenize": {
        **request_object(FIELDS_TO_TOKENIZE, example={"prompt": "The capital of France"}),
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
    "OpenAITokens": answer_object(
        {"count": int, "max_model_len": int, "tokens": [int], "token_strs": or_null([str])}
    ),
    "OpenAIToText": request_object(
        {"model": str | None, "tokens": TOKEN_IDS},
        required=("tokens",),
        example={"tokens": [1, 2, 3]},
    ),
    "OpenAIModel": answer_object(
        {
            **HEAD_OF_MODEL,
            "owned_by": str,
            "root": str,
            "parent": str | None,
            "has_chat_template": bool,
        }
    ),
    # This is for the clients of Anthropic's API.
    "AnthropicModel": answer_object(
        {"type": {"const": "model"}, "id": str, "display_name": str, "created_at": str}
    ),
    "OpenAIError": answer_object(
        {
            "error": answer_object(
                {"message": str, "type": str, "param": str | None, "code": str | None}
            )
        }
    ),
}


# Why the routes of tokens fail.
CAUSES_OF_TOKENS = (
    errors.InvalidRequest,
    errors.UnknownAdapter,
    errors.UnknownModel,
    errors.GenerationFailed,
)


def describe(config: Config) -> ApiDescription:
    """Describe the API and its routes."""
    about = "OpenAI's API. A stream ends with `[DONE]`." + about_defaults(config.model)
    rules = [OPENAI_CHAT.errors]
    api = ApiDescription(
        name="OpenAI",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
        error=content("OpenAIError"),
        rules=rules,
    )
    for path, summary, kind in (
        ("/v1/chat/completions", "Answer a conversation", "OpenAIChat"),
        ("/v1/completions", "Continue one or more prompts", "OpenAIText"),
    ):
        chunks = content(either(f"{kind}Chunk", "OpenAIError"), SSE, end="[DONE]")
        api.add_inference(path, summary, content(kind) | chunks, f"{kind}Request")

    _add_tokens(api)
    _add_models(api)
    return api


def _add_tokens(api: ApiDescription) -> None:
    """Describe the routes between text and token ids."""
    api.add(
        "post",
        "/tokenize",
        "The token ids of a prompt or a chat",
        "OpenAITokens",
        CAUSES_OF_TOKENS,
        body="OpenAIToTokenize",
    )

    api.add(
        "post",
        "/detokenize",
        "The text of token ids",
        content(answer_object({"prompt": str})),
        CAUSES_OF_TOKENS,
        body="OpenAIToText",
    )


def _add_models(api: ApiDescription) -> None:
    """Describe the routes of models, which clients of Anthropic's API ask too."""
    openai_models = answer_object({"object": {"const": "list"}, "data": ["OpenAIModel"]})
    anthropic_models = answer_object(
        {
            "data": ["AnthropicModel"],
            "has_more": bool,
            "first_id": or_null({"type": "string"}),
            "last_id": or_null({"type": "string"}),
        }
    )

    models = content(either(openai_models, anthropic_models))
    api.add("get", "/v1/models", "The model and its names", models)

    model = content(either("OpenAIModel", "AnthropicModel"))
    api.add("get", "/v1/models/{model}", "The model by a name of its", model)
