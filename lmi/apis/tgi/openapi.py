"""TGI's API: one prompt in, a list, an object or a stream of tokens out."""

from __future__ import annotations

from lmi.apis.base.formatter import SSE
from lmi.apis.base.openapi import NOTHING, ApiDescription, Form, asked, content, either, or_null, struct, taken
from lmi.apis.tgi.api import TGI
from lmi.apis.tgi.schema import PARAMETERS
from lmi.settings.config import Config

EXAMPLE = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 8, "details": True}}
FIELDS = {"inputs": {"type": "string", "minLength": 1}, "parameters": or_null(asked(taken(PARAMETERS)))}
ENDS = ("length", "eos_token", "stop_sequence")
PROMPT_TOKEN: dict[str, Form] = {"id": int, "text": str, "logprob": float | None}
SEQUENCE: dict[str, Form] = {
    "finish_reason": ENDS,
    "generated_tokens": int,
    "seed": int | None,
    "prefill": [struct(**PROMPT_TOKEN)],
    "tokens": ["TgiToken"],
    "top_tokens": [["TgiToken"]],
}
BEST_OF = [struct("top_tokens", generated_text=str, **SEQUENCE)]
SCHEMAS = {
    "TgiRequest": asked(FIELDS, "inputs", example=EXAMPLE),
    "TgiEitherRequest": asked(FIELDS | {"stream": bool | None}, "inputs", example=EXAMPLE),
    "TgiToken": struct(**PROMPT_TOKEN, special=bool),
    "TgiAnswer": struct(
        "details",
        generated_text=str,
        details=struct("top_tokens", "best_of_sequences", **SEQUENCE, best_of_sequences=BEST_OF),
    ),
    "TgiEvent": struct(
        "top_tokens",
        index=int,
        token="TgiToken",
        top_tokens=["TgiToken"],
        generated_text=str | None,
        details=or_null(struct(finish_reason=ENDS, generated_tokens=int, seed=int | None, input_length=int)),
    ),
    "TgiError": struct(error=str, error_type=str),
    "TgiInfo": struct(
        **dict.fromkeys(("model_id", "model_pipeline_tag", "router", "version", "kernels"), str),
        **dict.fromkeys(("model_sha", "sha", "docker_label"), None),
        **dict.fromkeys(("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens"), int),
        **dict.fromkeys(("max_total_tokens", "validation_workers", "max_client_batch_size"), int),
    ),
}


def describe(config: Config) -> ApiDescription:
    about, rules = "Text Generation Inference 3.3.", [TGI.errors]
    api = ApiDescription("TGI", about, config.model, SCHEMAS, content("TgiError"), rules)
    events, request = content(either("TgiEvent", "TgiError"), SSE), "TgiRequest"
    said, summary = content(["TgiAnswer"]) | events, "Continue a prompt, in a list or a stream"
    api.infer("/", summary, said, "TgiEitherRequest")
    api.infer("/generate", "Continue a prompt", "TgiAnswer", request)
    api.infer("/generate_stream", "Continue a prompt, token by token", events, request)
    api.add("get", "/info", "What is served, and its limits", "TgiInfo")
    api.add("get", "/health", "Whether requests are served", NOTHING)
    return api
