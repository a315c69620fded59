"""OpenAI's API: chat completions, completions, and the list of models."""

from __future__ import annotations

from lmi.apis.base.openapi import (
    INTEGER,
    NUMBER,
    OF_INFERENCE,
    SSE,
    STRING,
    ApiDescription,
    Operation,
    Schema,
    answers,
    array,
    asked,
    content,
    names,
    operation,
    or_null,
    ref,
    struct,
    taken,
)
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.apis.openai.chat_schema import CHAT, ROLES
from lmi.apis.openai.schema import COMPLETION
from lmi.errors import UnknownModel
from lmi.settings.config import Config

NAME = "OpenAI"
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "say Hello"}], "max_completion_tokens": 8}
EXAMPLE = {"prompt": "What is the capital of France?", "max_tokens": 8, "temperature": 0}
TEXT_PART = asked({"type": {"enum": ["text"]}, "text": STRING}, "type", "text")
MESSAGE = asked(
    {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [STRING, array(TEXT_PART), {"type": "null"}]},
        "tool_calls": or_null(array({"type": "object"})),
    },
    "role",
)
PROMPTS = array({"anyOf": [STRING, INTEGER, array(INTEGER)]})
PROMPT: Schema = {"anyOf": [{"type": "string", "minLength": 1}, {**PROMPTS, "minItems": 1}]}


def describe(config: Config) -> ApiDescription:
    failed = content(ref("OpenAIError"))

    def post(summary: str, kind: str) -> dict[str, Operation]:
        ok = content(ref(f"OpenAI{kind}"))
        ok |= content({"anyOf": [ref(f"OpenAI{kind}Chunk"), ref("OpenAIError")]}, SSE, end="[DONE]")
        failing = failed | content(ref("OpenAIError"), SSE, end="[DONE]")
        described = answers(ok, failing, OF_INFERENCE, [OPENAI_CHAT.errors])
        return {"post": operation(NAME, summary, described, content(ref(f"OpenAI{kind}Request")))}

    one = answers(content(ref("OpenAIModel")), failed, [UnknownModel])
    paths = {
        "/v1/chat/completions": post("Answer a conversation", "Chat"),
        "/v1/completions": post("Continue one or more prompts", "Text"),
        "/v1/models": {"get": operation(NAME, "The model and its names", answers(content(MODELS), failed))},
        "/v1/models/{model}": {
            "get": operation(NAME, "The model by a name of its", one, names=names(config.model, "/v1/models/{model}"))
        },
    }
    return ApiDescription(NAME, "OpenAI's API. A stream ends with `[DONE]`.", paths, SCHEMAS)


MODELS = struct({"object": {"const": "list"}, "data": array(ref("OpenAIModel"))})
HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
USAGE = struct(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": struct({"cached_tokens": INTEGER}),
    }
)
TOKEN = {"token": STRING, "logprob": or_null(NUMBER), "bytes": array(INTEGER)}
CHAT_LOG_PROBS = or_null(
    struct({"content": array(struct(TOKEN | {"top_logprobs": array(struct(TOKEN))})), "refusal": {"type": "null"}})
)
LOG_PROBS = or_null(
    struct(
        {
            "tokens": array(STRING),
            "token_logprobs": array(or_null(NUMBER)),
            "top_logprobs": or_null(array({"type": ["object", "null"]})),
            "text_offset": array(INTEGER),
        }
    )
)
CALL = struct(
    {
        "index": INTEGER,
        "id": STRING,
        "type": {"const": "function"},
        "function": struct({"name": STRING, "arguments": STRING}, "name"),
    },
    *("index", "id", "type"),
)
SAID = {
    "role": {"const": "assistant"},
    "content": or_null(STRING),
    "reasoning_content": STRING,
    "tool_calls": array(CALL),
}
REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}


def _answer(kind: str, choice: dict[str, Schema], usage: Schema, *optional: str) -> Schema:
    choices = array(struct({"index": INTEGER, **choice}))
    return struct({**HEAD, "object": {"const": kind}, "choices": choices, "usage": usage}, *optional)


SCHEMAS: dict[str, Schema] = {
    "OpenAIChatRequest": {
        **asked(taken(CHAT) | {"messages": {**array(MESSAGE), "minItems": 1}}, "messages"),
        "examples": [CHAT_EXAMPLE],
    },
    "OpenAITextRequest": {**asked(taken(COMPLETION) | {"prompt": PROMPT}, "prompt"), "examples": [EXAMPLE]},
    "OpenAIChat": _answer(
        "chat.completion",
        {
            "message": struct(SAID | {"refusal": {"type": "null"}}, "reasoning_content", "tool_calls"),
            "logprobs": CHAT_LOG_PROBS,
            "finish_reason": REASON,
        },
        USAGE,
    ),
    "OpenAIChatChunk": _answer(
        "chat.completion.chunk",
        {"delta": struct(SAID, *SAID), "logprobs": CHAT_LOG_PROBS, "finish_reason": or_null(REASON)},
        or_null(USAGE),
        "usage",
    ),
    "OpenAIText": _answer("text_completion", {"text": STRING, "logprobs": LOG_PROBS, "finish_reason": REASON}, USAGE),
    "OpenAITextChunk": _answer(
        "text_completion",
        {"text": STRING, "logprobs": LOG_PROBS, "finish_reason": or_null(REASON)},
        or_null(USAGE),
        "usage",
    ),
    "OpenAIModel": struct(
        {"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING, "parent": STRING}, "parent"
    ),
    "OpenAIError": struct(
        {"error": struct({"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)})}
    ),
}
