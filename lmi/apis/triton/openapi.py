"""Triton's API: the generate extension, and the other routes of KServe v2 clients."""

from __future__ import annotations

from typing import Any

from lmi.apis.base.openapi import (
    INTEGER,
    JSON,
    OF_INFERENCE,
    SSE,
    STRING,
    ApiDescription,
    Causes,
    Operation,
    Schema,
    answers,
    array,
    asked,
    content,
    names,
    operation,
    ref,
    struct,
)
from lmi.apis.base.readers import JSON_SCHEMAS
from lmi.apis.triton.api import MODELS, TRITON
from lmi.apis.triton.formatter import OUTPUTS
from lmi.apis.triton.schema import INPUTS, MAX_ID_BYTES, PACKED
from lmi.errors import UnknownModel
from lmi.settings.config import Config

NAME = "Triton"
SSE_UTF8 = f"{SSE}; charset=utf-8"
EXAMPLE = {"id": "42", "text_input": "What is the capital of France?", "parameters": {"max_tokens": 8}}


FIELDS = {name: JSON_SCHEMAS.get(row.read, {}) for name, row in INPUTS.items()}
NEEDED: Schema = {"required": ["text_input"]}
REQUEST: Schema = {
    "allOf": [ref("TritonInputs")],
    **asked(
        {
            "id": {"type": "string", "maxLength": MAX_ID_BYTES},
            PACKED: {"type": "string", "description": "JSON of an object with more of these names"},
            "parameters": ref("TritonInputs"),
        }
    ),
    "anyOf": [NEEDED, {"properties": {"parameters": NEEDED}, "required": ["parameters"]}],
    "description": "Each name once, at the top or in parameters; text_input is required.",
    "examples": [EXAMPLE],
}
PROMPT: Schema = {"type": ["string", "array"], "items": STRING, "minLength": 1, "minItems": 1, "maxItems": 1}


def describe(config: Config) -> ApiDescription:
    failed = content(ref("TritonError"))
    paths: dict[str, dict[str, Operation]] = {}

    def add(
        path: str, method: str, summary: str, ok: dict[str, Any], body: Any = None, causes: Causes = (UnknownModel,)
    ) -> None:
        responses = answers(ok, failed, causes, [TRITON.errors])
        paths.setdefault(path, {})[method] = operation(NAME, summary, responses, body, names(config.model, path))

    body = content(ref("TritonRequest"))
    nothing, text = (
        {"text/plain": {"schema": {"type": "string", "maxLength": 0}}},
        {JSON: {"schema": {"type": "object"}}},
    )
    for model in MODELS:
        add(f"{model}/generate", "post", "Continue a prompt", content(ref("TritonAnswer")), body, OF_INFERENCE)
        events = content(ref("TritonEvent"), SSE_UTF8)
        add(f"{model}/generate_stream", "post", "Continue a prompt, piece by piece", events, body, OF_INFERENCE)
        add(model, "get", "What the model takes and gives", content(ref("TritonModel")))
        add(f"{model}/ready", "get", "Whether the model is ready", nothing)
        add(f"{model}/stats", "get", "How many requests came to which end", content(ref("TritonStats")))
        for path, method in ((f"{model}/infer", "post"), (f"{model}/config", "get")):
            add(path, method, "Not served: always 404", text)
            del paths[path][method]["responses"]["200"]
    add("/v2/models/stats", "get", "The same of every model, of which there is one", content(ref("TritonStats")))
    for path in ("/v2", "/v2/"):
        add(path, "get", "Who answers", content(ref("TritonServer")))
    add("/v2/health/live", "get", "Whether the server lives", nothing)
    add("/v2/health/ready", "get", "Whether the server is ready", nothing)
    add("/v2/repository/index", "post", "The model that is here", content(ref("TritonIndex")))
    about = "Triton's generate extension on KServe v2. The end of the body is the end of a stream."
    return ApiDescription(NAME, about, paths, SCHEMAS)


HEAD = {"id": STRING, "model_name": STRING, "model_version": STRING}


def one_or_more(schema: Schema) -> Schema:
    return {"anyOf": [schema, array(schema)]}


VALUES: dict[str, Schema] = {"FP32": {"type": ["number", "null"]}, "BYTES": STRING, "UINT32": INTEGER}
GIVEN = {
    **HEAD,
    "text_output": one_or_more(STRING),
    **{name: one_or_more(VALUES[datatype]) for name, datatype in OUTPUTS.items()},
}
TENSOR = struct({"name": STRING, "datatype": STRING, "shape": array(INTEGER)})
COUNT = struct({"count": INTEGER})
SCHEMAS: dict[str, Schema] = {
    "TritonInputs": asked(FIELDS | {"text_input": PROMPT}),
    "TritonRequest": REQUEST,
    "TritonAnswer": struct(GIVEN, "id", *OUTPUTS),
    "TritonEvent": struct(GIVEN | {"error": STRING}, *GIVEN, "error"),
    "TritonError": struct({"error": STRING}),
    "TritonServer": struct({"name": STRING, "version": STRING, "extensions": array(STRING)}),
    "TritonModel": struct(
        {
            "name": STRING,
            "versions": array(STRING),
            "platform": STRING,
            "inputs": array(TENSOR),
            "outputs": array(TENSOR),
        }
    ),
    "TritonIndex": array(struct({"name": STRING, "version": STRING, "state": STRING, "reason": STRING}, "reason")),
    "TritonStats": struct(
        {
            "model_stats": array(
                struct(
                    {
                        "name": STRING,
                        "version": STRING,
                        "inference_count": INTEGER,
                        "execution_count": INTEGER,
                        "inference_stats": struct({"success": COUNT, "fail": COUNT, "cancel": COUNT}),
                    }
                )
            )
        }
    ),
}
