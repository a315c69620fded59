"""Triton's API: the generate extension, and the other routes of KServe v2 clients."""

from __future__ import annotations

from lmi.apis.base.formatter import SSE
from lmi.apis.base.openapi import NOTHING, ApiDescription, Form, Schema, asked, content, either, schema_of, struct
from lmi.apis.base.readers import JSON_SCHEMAS
from lmi.apis.triton.api import MODELS, OUTPUTS, TRITON
from lmi.apis.triton.schema import INPUTS, MAX_ID_BYTES, PACKED
from lmi.settings.config import Config

EXAMPLE = {"id": "42", "text_input": "What is the capital of France?", "parameters": {"max_tokens": 8}}
FIELDS = {name: JSON_SCHEMAS.get(row.read, {}) for name, row in INPUTS.items()}
NEEDED: Schema = {"required": ["text_input"]}
REQUEST: Schema = {
    "allOf": [schema_of("TritonInputs")],
    **asked(
        {
            "id": {"type": "string", "maxLength": MAX_ID_BYTES},
            PACKED: {"type": "string", "description": "JSON of an object with more of these names"},
            "parameters": "TritonInputs",
        }
    ),
    "anyOf": [NEEDED, {"properties": {"parameters": NEEDED}, "required": ["parameters"]}],
    "description": "Each name once, at the top or in parameters; text_input is required.",
    "examples": [EXAMPLE],
}
PROMPT: Schema = {"type": ["string", "array"], "items": schema_of(str), "minLength": 1, "minItems": 1, "maxItems": 1}


def one_or_more(form: Form) -> Schema:
    return either(form, [form])


VALUES: dict[str, Form] = {"FP32": float | None, "BYTES": str, "UINT32": int}
GIVEN: dict[str, Form] = {
    **dict.fromkeys(("id", "model_name", "model_version"), str),
    "text_output": one_or_more(str),
    **{name: one_or_more(VALUES[datatype]) for name, datatype in OUTPUTS.items()},
}
TENSORS = [struct(name=str, datatype=str, shape=[int])]
COUNT = struct(count=int)
SCHEMAS = {
    "TritonInputs": asked(FIELDS | {"text_input": PROMPT}),
    "TritonRequest": REQUEST,
    "TritonAnswer": struct("id", *OUTPUTS, **GIVEN),
    "TritonEvent": struct(*GIVEN, "error", **GIVEN, error=str),
    "TritonError": struct(error=str),
    "TritonServer": struct(name=str, version=str, extensions=[str]),
    "TritonModel": struct(name=str, versions=[str], platform=str, inputs=TENSORS, outputs=TENSORS),
    "TritonIndex": schema_of([struct("reason", name=str, version=str, state=str, reason=str)]),
    "TritonStats": struct(
        model_stats=[
            struct(
                name=str,
                version=str,
                inference_count=int,
                execution_count=int,
                inference_stats=struct(success=COUNT, fail=COUNT, cancel=COUNT),
            )
        ]
    ),
}


def describe(config: Config) -> ApiDescription:
    about = "Triton's generate extension on KServe v2. The end of the body is the end of a stream."
    api = ApiDescription("Triton", about, config.model, SCHEMAS, content("TritonError"), [TRITON.errors])
    events, request = content("TritonEvent", f"{SSE}; charset=utf-8"), "TritonRequest"
    for model in MODELS:
        api.infer(f"{model}/generate", "Continue a prompt", "TritonAnswer", request)
        piecewise = "Continue a prompt, piece by piece"
        api.infer(f"{model}/generate_stream", piecewise, events, request)
        api.add("get", model, "What the model takes and gives", "TritonModel")
        api.add("get", f"{model}/ready", "Whether the model is ready", NOTHING)
        api.add("get", f"{model}/stats", "How many requests came to which end", "TritonStats")
        api.add("post", f"{model}/infer", "Not served: always 404", None)
        api.add("get", f"{model}/config", "Not served: always 404", None)
    api.add("get", "/v2/models/stats", "The same of every model, of which there is one", "TritonStats")
    for path in ("/v2", "/v2/"):
        api.add("get", path, "Who answers", "TritonServer")
    api.add("get", "/v2/health/live", "Whether the server lives", NOTHING)
    api.add("get", "/v2/health/ready", "Whether the server is ready", NOTHING)
    api.add("post", "/v2/repository/index", "The model that is here", "TritonIndex")
    return api
