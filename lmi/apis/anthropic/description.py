"""Anthropic's Messages in /openapi.json."""

from lmi.apis.anthropic.api import ANTHROPIC
from lmi.apis.anthropic.formatter import STOP_REASONS
from lmi.apis.anthropic.schema import BLOCKS, MESSAGES
from lmi.apis.base.media_types import SSE
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


def _typed(kind: str, **fields: Form) -> Schema:
    return answer_object({"type": {"const": kind}, **fields})


EXAMPLE = {
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
SAYS = either(str, [request_object({"type": str}, required=("type",))])
FIELDS = table_schemas(MESSAGES) | {
    "max_tokens": {"type": "integer", "minimum": 1},
    "messages": {
        **array(
            request_object(
                {"role": tuple(BLOCKS), "content": SAYS},
                required=("role", "content"),
            )
        ),
        "minItems": 1,
    },
    "system": or_null(SAYS),
    "tools": or_null(
        [
            request_object(
                {"name": {"type": "string", "minLength": 1}, "input_schema": dict},
                required=("name",),
            )
        ]
    ),
}
SAID = either(
    _typed("text", text=str),
    _typed("thinking", thinking=str, signature=str),
    _typed("tool_use", id=str, name=str, input=dict),
)
END: dict[str, Form] = {
    "stop_reason": or_null((*STOP_REASONS.values(), "tool_use")),
    "stop_sequence": str | None,
}
USAGE = answer_object(
    {
        "input_tokens": int,
        "cache_creation_input_tokens": int,
        "cache_read_input_tokens": int,
        "output_tokens": int,
    }
)
DELTA = answer_object(
    {
        "type": ("text_delta", "thinking_delta", "input_json_delta"),
        "text": str,
        "thinking": str,
        "partial_json": str,
    },
    optional=("text", "thinking", "partial_json"),
)
SCHEMAS = {
    "AnthropicRequest": request_object(
        FIELDS,
        required=("max_tokens", "messages"),
        example=EXAMPLE,
    ),
    "AnthropicCount": request_object(
        FIELDS, required=("messages",), example={"messages": EXAMPLE["messages"]}
    ),
    "AnthropicMessage": answer_object(
        {
            "id": str,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": str,
            "content": [SAID],
            **END,
            "usage": USAGE,
        }
    ),
    "AnthropicEvent": either(
        _typed("message_start", message="AnthropicMessage"),
        _typed("ping"),
        _typed("content_block_start", index=int, content_block=SAID),
        _typed("content_block_delta", index=int, delta=DELTA),
        _typed("content_block_stop", index=int),
        answer_object(
            {
                "type": {"const": "message_delta"},
                "delta": answer_object(END),
                "usage": USAGE,
                **WAITING,
            },
            optional=WAITING,
        ),
        _typed("message_stop"),
    ),
    "AnthropicError": _typed(
        "error",
        error=answer_object({"type": str, "message": str, "details": dict}, optional=("details",)),
        request_id=str | None,
    ),
}


def describe(config: Config) -> ApiDescription:
    """Describe the routes of messages and of their tokens."""
    about = "Anthropic's API, with which coding agents work." + about_defaults(config.model)
    rules = [ANTHROPIC.errors]
    api = ApiDescription(
        name="Anthropic",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
        error=content("AnthropicError"),
        rules=rules,
    )

    answer = content("AnthropicMessage") | content(either("AnthropicEvent", "AnthropicError"), SSE)
    api.add_inference("/v1/messages", "Answer a conversation", answer, "AnthropicRequest")

    count = content(answer_object({"input_tokens": int}))
    path = "/v1/messages/count_tokens"
    api.add_inference(path, "Count the tokens of a conversation", count, "AnthropicCount")
    return api
