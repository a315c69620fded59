"""OpenAI's Responses in /openapi.json."""

from lmi.apis.base.media_types import SSE
from lmi.apis.openai.description import CACHED_TOKENS
from lmi.apis.responses import schema
from lmi.apis.responses.api import RESPONSES
from lmi.apis.responses.state import DEFAULT_SETTINGS
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

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 8}
ITEM = request_object(
    {"type": str, "content": either(str, [request_object({"type": str}, required=("type",))])}
)
FIELDS = table_schemas(schema.RESPONSES) | {
    "input": either({"type": "string"}, {**array(ITEM), "minItems": 1}),
    "tools": or_null(
        [
            request_object(
                {"type": ("function",), "name": {"type": "string", "minLength": 1}},
                required=("type", "name"),
            )
        ]
    ),
}
STATUS = ("in_progress", "completed", "incomplete")
OUTPUT_TEXT = answer_object(
    {"type": {"const": "output_text"}, "text": str, "annotations": [dict], "logprobs": [dict]}
)
REASONING_TEXT = answer_object({"type": {"const": "reasoning_text"}, "text": str})
PART = either(OUTPUT_TEXT, REASONING_TEXT)
CALL: dict[str, Form] = {"call_id": str, "name": str, "arguments": str, "status": STATUS}
OUTPUT = either(
    answer_object(
        {
            "type": {"const": "message"},
            "id": str,
            "status": STATUS,
            "role": {"const": "assistant"},
            "content": [OUTPUT_TEXT],
        }
    ),
    answer_object(
        {"type": {"const": "reasoning"}, "id": str, "summary": [dict], "content": [REASONING_TEXT]}
    ),
    answer_object({"type": {"const": "function_call"}, "id": str, **CALL}),
)
USAGE = answer_object(
    {
        "input_tokens": int,
        "output_tokens": int,
        "total_tokens": int,
        "input_tokens_details": CACHED_TOKENS,
        "output_tokens_details": answer_object({"reasoning_tokens": int}),
    }
)
PLACE: dict[str, Form] = {"item_id": str, "output_index": int, "content_index": int}
MORE: dict[str, Form] = {
    **PLACE,
    "item": OUTPUT,
    "part": PART,
    "response": "Response",
    "logprobs": [dict],
    "delta": str,
    "text": str,
    "arguments": str,
    "name": str,
    **WAITING,
}

NAMES = (
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
)

SCHEMAS = {
    "ResponseRequest": request_object(FIELDS, required=("input",), example=EXAMPLE),
    "Response": answer_object(
        {
            "id": str,
            "object": {"const": "response"},
            "created_at": int,
            "completed_at": int | None,
            "status": (*STATUS, "failed"),
            "model": str,
            "output": [OUTPUT],
            "error": or_null(answer_object({"code": str, "message": str})),
            "incomplete_details": or_null(
                answer_object({"reason": {"const": "max_output_tokens"}})
            ),
            "usage": or_null(USAGE),
            **{name: Schema() for name in DEFAULT_SETTINGS},
        }
    ),
    "ResponseEvent": answer_object({"type": NAMES, "sequence_number": int, **MORE}, optional=MORE),
}


def describe(config: Config) -> ApiDescription:
    """Describe the routes of responses and of their tokens."""
    about = "OpenAI's Responses, with which coding agents work. Nothing is kept."
    about += about_defaults(config.model)
    rules = [RESPONSES.errors]
    api = ApiDescription(
        name="Responses",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
        error=content("OpenAIError"),
        rules=rules,
    )

    request = "ResponseRequest"
    response = content("Response") | content("ResponseEvent", SSE)
    api.add_inference("/v1/responses", "Answer a conversation", response, request)

    count = content(
        answer_object({"object": {"const": "response.input_tokens"}, "input_tokens": int})
    )
    path = "/v1/responses/input_tokens"
    api.add_inference(path, "Count the tokens of a conversation", count, request)
    return api
