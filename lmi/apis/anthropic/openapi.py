"""Anthropic's API: messages, and the number of their tokens."""

from __future__ import annotations

from lmi.apis.anthropic.api import ANTHROPIC, ENDS
from lmi.apis.anthropic.schema import BLOCKS, MESSAGES
from lmi.apis.base.formatter import SSE
from lmi.apis.base.openapi import ApiDescription, Form, Schema, array, asked, content, either, or_null, struct, taken
from lmi.settings.config import Config

EXAMPLE = {"max_tokens": 8, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
BLOCK = asked({"type": str}, "type")
SAYS = either(str, [BLOCK])
FIELDS = taken(MESSAGES) | {
    "max_tokens": {"type": "integer", "minimum": 1},
    "messages": {**array(asked({"role": tuple(BLOCKS), "content": SAYS}, "role", "content")), "minItems": 1},
    "system": or_null(SAYS),
    "tools": or_null([asked({"name": {"type": "string", "minLength": 1}, "input_schema": dict}, "name")]),
}
TEXT: dict[str, Form] = {"type": {"const": "text"}, "text": str}
THOUGHT: dict[str, Form] = {"type": {"const": "thinking"}, "thinking": str, "signature": str}
CALL: dict[str, Form] = {"type": {"const": "tool_use"}, "id": str, "name": str, "input": dict}
SAID = either(struct(**TEXT), struct(**THOUGHT), struct(**CALL))
END: dict[str, Form] = {"stop_reason": or_null((*ENDS.values(), "tool_use")), "stop_sequence": str | None}
USAGE = struct(
    **dict.fromkeys(("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), int)
)
DELTA = struct(
    *("text", "thinking", "partial_json"),
    type=("text_delta", "thinking_delta", "input_json_delta"),
    **dict.fromkeys(("text", "thinking", "partial_json"), str),
)


def _event(kind: str, **fields: Form) -> Schema:
    return struct(type={"const": kind}, **fields)


SCHEMAS = {
    "AnthropicRequest": asked(FIELDS, "max_tokens", "messages", example=EXAMPLE),
    "AnthropicCount": asked(FIELDS, "messages", example={"messages": EXAMPLE["messages"]}),
    "AnthropicMessage": struct(
        id=str, type={"const": "message"}, role={"const": "assistant"}, model=str, content=[SAID], **END, usage=USAGE
    ),
    "AnthropicEvent": either(
        _event("message_start", message="AnthropicMessage"),
        _event("ping"),
        _event("content_block_start", index=int, content_block=SAID),
        _event("content_block_delta", index=int, delta=DELTA),
        _event("content_block_stop", index=int),
        _event("message_delta", delta=struct(**END), usage=USAGE),
        _event("message_stop"),
    ),
    "AnthropicError": struct(type={"const": "error"}, error=struct(type=str, message=str), request_id=str | None),
}


def describe(config: Config) -> ApiDescription:
    about, rules = "Anthropic's API, with which coding agents work.", [ANTHROPIC.errors]
    api = ApiDescription("Anthropic", about, config.model, SCHEMAS, content("AnthropicError"), rules)
    ok = content("AnthropicMessage") | content(either("AnthropicEvent", "AnthropicError"), SSE)
    api.infer("/v1/messages", "Answer a conversation", ok, "AnthropicRequest")
    count, path = content(struct(input_tokens=int)), "/v1/messages/count_tokens"
    api.infer(path, "Count the tokens of a conversation", count, "AnthropicCount")
    return api
