"""OpenAI's Responses."""

from __future__ import annotations

from lmi.apis.base.formatter import SSE
from lmi.apis.base.openapi import ApiDescription, Form, Schema, array, asked, content, either, or_null, struct, taken
from lmi.apis.openai.openapi import CACHED
from lmi.apis.responses.api import EVENTS
from lmi.apis.responses.api import RESPONSES as API
from lmi.apis.responses.schema import RESPONSES, SETTINGS
from lmi.settings.config import Config

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 8}
ITEM = asked({"type": str, "content": either(str, [asked({"type": str}, "type")])})
FIELDS = taken(RESPONSES) | {
    "input": either({"type": "string"}, {**array(ITEM), "minItems": 1}),
    "tools": or_null([asked({"type": ("function",), "name": {"type": "string", "minLength": 1}}, "type", "name")]),
}
STATUS = ("in_progress", "completed", "incomplete")
OUTPUT_TEXT = struct(type={"const": "output_text"}, text=str, annotations=[dict], logprobs=[dict])
REASONING_TEXT = struct(type={"const": "reasoning_text"}, text=str)
PART = either(OUTPUT_TEXT, REASONING_TEXT)
CALL: dict[str, Form] = {"call_id": str, "name": str, "arguments": str, "status": STATUS}
OUTPUT = either(
    struct(type={"const": "message"}, id=str, status=STATUS, role={"const": "assistant"}, content=[OUTPUT_TEXT]),
    struct(type={"const": "reasoning"}, id=str, summary=[dict], content=[REASONING_TEXT]),
    struct(type={"const": "function_call"}, id=str, **CALL),
)
USAGE = struct(
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), int),
    input_tokens_details=CACHED,
    output_tokens_details=struct(reasoning_tokens=int),
)
PLACE: dict[str, Form] = {"item_id": str, "output_index": int, "content_index": int}
MORE: dict[str, Form] = PLACE | {"item": OUTPUT, "part": PART, "response": "Response", "logprobs": [dict]}
MORE |= dict.fromkeys(("delta", "text", "arguments", "name"), str)
OF_RESPONSE = ("created", "in_progress", "completed", "incomplete", "failed")
OF_ITEM = ("output_item.added", "output_item.done", "content_part.added", "content_part.done")
NAMES = (*(f"response.{name}" for name in (*OF_RESPONSE, *OF_ITEM)),)
NAMES += tuple(f"{name}.{end}" for name in EVENTS.values() for end in ("delta", "done"))
REPEATED: dict[str, Form] = {name: Schema() for name in SETTINGS}
SCHEMAS = {
    "ResponseRequest": asked(FIELDS, "input", example=EXAMPLE),
    "Response": struct(
        id=str,
        object={"const": "response"},
        created_at=int,
        completed_at=int | None,
        status=(*STATUS, "failed"),
        model=str,
        output=[OUTPUT],
        error=or_null(struct(code=str, message=str)),
        incomplete_details=or_null(struct(reason={"const": "max_output_tokens"})),
        usage=or_null(USAGE),
        **REPEATED,
    ),
    "ResponseEvent": struct(*MORE, type=NAMES, sequence_number=int, **MORE),
}


def describe(config: Config) -> ApiDescription:
    about, rules = "OpenAI's Responses, with which coding agents work. Nothing is kept.", [API.errors]
    api = ApiDescription("Responses", about, config.model, SCHEMAS, content("OpenAIError"), rules)
    ok = content("Response") | content("ResponseEvent", SSE)
    api.infer("/v1/responses", "Answer a conversation", ok, "ResponseRequest")
    return api
