"""Triton's generate extension in /openapi.json."""

from lmi.apis.base.readers import json_schema_of
from lmi.apis.triton.api import MODELS, OUTPUTS, TRITON, TritonStream
from lmi.apis.triton.inputs import INPUTS, PACKED
from lmi.apis.triton.schema import MAX_ID_BYTES
from lmi.description.operations import ApiDescription
from lmi.description.schemas import (
    NOTHING,
    Form,
    Schema,
    answer_object,
    content,
    either,
    request_object,
    schema_of,
)
from lmi.settings.config import Config


def _one_or_several(form: Form) -> Schema:
    return either(form, [form])


EXAMPLE = {
    "id": "42",
    "text_input": "What is the capital of France?",
    "parameters": {"max_tokens": 8},
}
FIELDS_OF_INPUTS = {name: json_schema_of(row.read) for name, row in INPUTS.items()}
HAS_PROMPT: Schema = {"required": ["text_input"]}
REQUEST: Schema = {
    "allOf": [schema_of("TritonInputs")],
    **request_object(
        {
            "id": {"type": "string", "maxLength": MAX_ID_BYTES},
            PACKED: {
                "type": "string",
                "description": "JSON of an object with more of these names",
            },
            "parameters": "TritonInputs",
        }
    ),
    "anyOf": [HAS_PROMPT, {"properties": {"parameters": HAS_PROMPT}, "required": ["parameters"]}],
    "description": "Each name once, at the top or in parameters; text_input is required.",
    "examples": [EXAMPLE],
}
PROMPT: Schema = {
    "type": ["string", "array"],
    "items": schema_of(str),
    "minLength": 1,
    "minItems": 1,
    "maxItems": 1,
}
# The values of a tensor, by its type.
VALUES: dict[str, Form] = {
    "FP32": float | None,
    "BYTES": str,
    "UINT32": int,
}
FIELDS_OF_ANSWER: dict[str, Form] = {
    "id": str,
    "model_name": str,
    "model_version": str,
    "text_output": either(str, [str]),
}
FIELDS_OF_ANSWER |= {name: _one_or_several(VALUES[datatype]) for name, datatype in OUTPUTS.items()}
TENSORS = [answer_object({"name": str, "datatype": str, "shape": [int]})]
NUMBERS_OF_REQUESTS: dict[str, Form] = {"inference_count": int, "execution_count": int}
# How often requests have ended in each way.
NUMBERS_OF_ENDS = answer_object(
    {
        "success": answer_object({"count": int}),
        "fail": answer_object({"count": int}),
        "cancel": answer_object({"count": int}),
    }
)
SCHEMAS = {
    "TritonInputs": request_object(FIELDS_OF_INPUTS | {"text_input": PROMPT}),
    "TritonRequest": REQUEST,
    "TritonAnswer": answer_object(FIELDS_OF_ANSWER, optional=("id", *OUTPUTS)),
    "TritonEvent": answer_object(
        {**FIELDS_OF_ANSWER, "error": str}, optional=(*FIELDS_OF_ANSWER, "error")
    ),
    "TritonError": answer_object({"error": str}),
    "TritonServer": answer_object({"name": str, "version": str, "extensions": [str]}),
    "TritonModel": answer_object(
        {"name": str, "versions": [str], "platform": str, "inputs": TENSORS, "outputs": TENSORS}
    ),
    "TritonIndex": schema_of(
        [
            answer_object(
                {"name": str, "version": str, "state": str, "reason": str}, optional=("reason",)
            )
        ]
    ),
    "TritonStats": answer_object(
        {
            "model_stats": [
                answer_object(
                    {
                        "name": str,
                        "version": str,
                        **NUMBERS_OF_REQUESTS,
                        "inference_stats": NUMBERS_OF_ENDS,
                    }
                )
            ]
        }
    ),
}


def describe(config: Config) -> ApiDescription:
    """Describe the routes of the server, and for each path of a model those of the model."""
    about = "Triton's generate extension on KServe v2. The end of the body is the end of a stream."
    api = ApiDescription(
        name="Triton",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
        error=content("TritonError"),
        rules=[TRITON.errors],
    )
    events = content("TritonEvent", TritonStream.media_type)
    request = "TritonRequest"
    for model in MODELS:
        api.add_inference(f"{model}/generate", "Continue a prompt", "TritonAnswer", request)
        piecewise = "Continue a prompt, piece by piece"
        api.add_inference(f"{model}/generate_stream", piecewise, events, request)
        api.add("get", model, "What the model takes and gives", "TritonModel")
        api.add("get", f"{model}/ready", "Whether the model is ready", NOTHING)
        api.add("get", f"{model}/stats", "How many requests came to which end", "TritonStats")
        api.add("post", f"{model}/infer", "Not served: always 404", None)
        api.add("get", f"{model}/config", "Not served: always 404", None)

    summary = "The same of every model, of which there is one"
    api.add("get", "/v2/models/stats", summary, "TritonStats")
    for path in ("/v2", "/v2/"):
        api.add("get", path, "Who answers", "TritonServer")

    api.add("get", "/v2/health/live", "Whether the server lives", NOTHING)
    api.add("get", "/v2/health/ready", "Whether the server is ready", NOTHING)
    api.add("post", "/v2/repository/index", "The model that is here", "TritonIndex")
    return api
