"""TGI's API in /openapi.json."""

from lmi.apis.base.media_types import SSE
from lmi.apis.tgi.api import TGI
from lmi.apis.tgi.schema import PARAMETERS
from lmi.description.operations import ApiDescription
from lmi.description.schemas import (
    NOTHING,
    Form,
    answer_object,
    content,
    either,
    or_null,
    request_object,
    table_schemas,
)
from lmi.settings.config import Config

EXAMPLE = {
    "inputs": "What is the capital of France?",
    "parameters": {"max_new_tokens": 8, "details": True},
}
FIELDS = {
    "inputs": {"type": "string", "minLength": 1},
    "parameters": or_null(request_object(table_schemas(PARAMETERS))),
}
ENDS = ("length", "eos_token", "stop_sequence")
PROMPT_TOKEN: dict[str, Form] = {"id": int, "text": str, "logprob": float | None}
SEQUENCE: dict[str, Form] = {
    "finish_reason": ENDS,
    "generated_tokens": int,
    "seed": int | None,
    "prefill": [answer_object(PROMPT_TOKEN)],
    "tokens": ["TgiToken"],
    "top_tokens": [["TgiToken"]],
}
BEST_OF = [answer_object({"generated_text": str, **SEQUENCE}, optional=("top_tokens",))]
DETAILS = answer_object(
    {**SEQUENCE, "best_of_sequences": BEST_OF}, optional=("top_tokens", "best_of_sequences")
)
EVENT_TOKENS: dict[str, Form] = {"token": "TgiToken", "top_tokens": ["TgiToken"]}
EVENT_DETAILS = or_null(
    answer_object(
        {"finish_reason": ENDS, "generated_tokens": int, "seed": int | None, "input_length": int}
    )
)
SCHEMAS = {
    "TgiRequest": request_object(FIELDS, required=("inputs",), example=EXAMPLE),
    "TgiEitherRequest": request_object(
        FIELDS | {"stream": bool | None}, required=("inputs",), example=EXAMPLE
    ),
    "TgiToken": answer_object({**PROMPT_TOKEN, "special": bool}),
    "TgiAnswer": answer_object({"generated_text": str, "details": DETAILS}, optional=("details",)),
    "TgiEvent": answer_object(
        {"index": int, **EVENT_TOKENS, "generated_text": str | None, "details": EVENT_DETAILS},
        optional=("top_tokens",),
    ),
    "TgiError": answer_object({"error": str, "error_type": str}),
    "TgiInfo": answer_object(
        {
            "model_id": str,
            "model_pipeline_tag": str,
            "router": str,
            "version": str,
            "kernels": str,
            "model_sha": None,
            "sha": None,
            "docker_label": None,
            "max_concurrent_requests": int,
            "max_best_of": int,
            "max_stop_sequences": int,
            "max_input_tokens": int,
            "max_total_tokens": int,
            "validation_workers": int,
            "max_client_batch_size": int,
        }
    ),
}


def describe(config: Config) -> ApiDescription:
    """Describe TGI's routes."""
    about = "Text Generation Inference 3.3."
    rules = [TGI.errors]
    api = ApiDescription(
        name="TGI",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
        error=content("TgiError"),
        rules=rules,
    )

    events = content(either("TgiEvent", "TgiError"), SSE)
    request = "TgiRequest"
    list_or_events = content(["TgiAnswer"]) | events
    summary = "Continue a prompt, in a list or a stream"
    api.add_inference("/", summary, list_or_events, "TgiEitherRequest")
    api.add_inference("/generate", "Continue a prompt", "TgiAnswer", request)
    api.add_inference("/generate_stream", "Continue a prompt, token by token", events, request)

    api.add("get", "/info", "What is served, and its limits", "TgiInfo")
    api.add("get", "/health", "Whether requests are served", NOTHING)
    return api
