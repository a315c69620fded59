"""TGI's API: one prompt in, a list, an object or a stream of tokens out."""

from __future__ import annotations

from lmi.apis.base.openapi import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OF_INFERENCE,
    SSE,
    STRING,
    ApiDescription,
    Schema,
    answers,
    array,
    asked,
    content,
    operation,
    or_null,
    ref,
    struct,
    taken,
)
from lmi.apis.tgi.api import TGI
from lmi.apis.tgi.schema import PARAMETERS
from lmi.settings.config import Config

NAME = "TGI"
EXAMPLE = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 8, "details": True}}
FIELDS: dict[str, Schema] = {
    "inputs": {"type": "string", "minLength": 1},
    "parameters": or_null(asked(taken(PARAMETERS))),
}


def describe(config: Config) -> ApiDescription:
    failed = content(ref("TgiError"))
    streamed = content(ref("TgiEvent"), SSE)

    def post(summary: str, request: str, ok: dict[str, Schema]) -> dict[str, Schema]:
        # An error is an event if an engine had the request before it failed.
        failing = failed | content(ref("TgiError"), SSE) if SSE in ok else failed
        described = answers(ok, failing, OF_INFERENCE, [TGI.errors])
        return {"post": operation(NAME, summary, described, content(ref(request)))}

    either = content(array(ref("TgiAnswer"))) | streamed
    info = answers(content(ref("TgiInfo")), failed)
    healthy = answers({"text/plain": {"schema": {"type": "string", "maxLength": 0}}}, failed)
    paths = {
        "/": post("Continue a prompt, in a list or a stream", "TgiEitherRequest", either),
        "/generate": post("Continue a prompt", "TgiRequest", content(ref("TgiAnswer"))),
        "/generate_stream": post("Continue a prompt, token by token", "TgiRequest", streamed),
        "/info": {"get": operation(NAME, "What is served, and its limits", info)},
        "/health": {"get": operation(NAME, "Whether requests are served", healthy)},
    }
    return ApiDescription(NAME, "Text Generation Inference 3.3.", paths, SCHEMAS)


REASON: Schema = {"enum": ["length", "eos_token", "stop_sequence"]}
PROMPT_TOKEN = {"id": INTEGER, "text": STRING, "logprob": or_null(NUMBER)}
SEQUENCE = {
    "finish_reason": REASON,
    "generated_tokens": INTEGER,
    "seed": or_null(INTEGER),
    "prefill": array(struct(PROMPT_TOKEN)),
    "tokens": array(ref("TgiToken")),
    "top_tokens": array(array(ref("TgiToken"))),
}
BEST_OF = array(struct({"generated_text": STRING, **SEQUENCE}, "top_tokens"))
STREAM_DETAILS = {
    "finish_reason": REASON,
    "generated_tokens": INTEGER,
    "seed": or_null(INTEGER),
    "input_length": INTEGER,
}
SCHEMAS: dict[str, Schema] = {
    "TgiRequest": {**asked(FIELDS, "inputs"), "examples": [EXAMPLE]},
    "TgiEitherRequest": {**asked(FIELDS | {"stream": or_null(BOOLEAN)}, "inputs"), "examples": [EXAMPLE]},
    "TgiToken": struct({**PROMPT_TOKEN, "special": BOOLEAN}),
    "TgiAnswer": struct(
        {
            "generated_text": STRING,
            "details": struct({**SEQUENCE, "best_of_sequences": BEST_OF}, "top_tokens", "best_of_sequences"),
        },
        "details",
    ),
    "TgiEvent": struct(
        {
            "index": INTEGER,
            "token": ref("TgiToken"),
            "top_tokens": array(ref("TgiToken")),
            "generated_text": or_null(STRING),
            "details": or_null(struct(STREAM_DETAILS)),
        },
        "top_tokens",
    ),
    "TgiError": struct({"error": STRING, "error_type": STRING}),
    "TgiInfo": struct(
        {
            "model_id": STRING,
            "model_sha": {"type": "null"},
            "model_pipeline_tag": STRING,
            "max_concurrent_requests": INTEGER,
            "max_best_of": INTEGER,
            "max_stop_sequences": INTEGER,
            "max_input_tokens": INTEGER,
            "max_total_tokens": INTEGER,
            "validation_workers": INTEGER,
            "max_client_batch_size": INTEGER,
            "router": STRING,
            "version": STRING,
            "sha": {"type": "null"},
            "docker_label": {"type": "null"},
            "kernels": STRING,
        }
    ),
}
