"""The LMI door: one prompt in, an object or a stream of tokens out, under the four paths that its clients know."""

from __future__ import annotations

from lmi.config import Config
from lmi.dialects import LMI_INVALID_STATUS
from lmi.schemas.lmi import PARAMETERS
from lmi.server.openapi.parts import (
    BOOLEAN,
    INTEGER,
    JSON,
    JSONLINES,
    NUMBER,
    OF_INFERENCE,
    SSE,
    STRING,
    Door,
    Operation,
    Schema,
    answers,
    array,
    asked,
    content,
    names,
    operation,
    or_null,
    ref,
    struct,
    taken,
)

NAME = "LMI"
PATHS = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
PROMPT: Schema = {"type": "string", "minLength": 1}
EXAMPLE = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 8, "details": True}}
REQUEST = {
    **asked(
        {
            "inputs": PROMPT,
            "stream": or_null(BOOLEAN),
            "parameters": or_null(asked(taken({name: entry.read for name, entry in PARAMETERS.items()}))),
            "adapters": {"description": "refused unless null: no adapter is loaded"},
        },
        "inputs",
    ),
    "examples": [EXAMPLE],
}


def door(config: Config) -> Door:
    is_tgi = config.model.tgi_compat
    body = {JSON: {"schema": ref("LmiRequest")}, "text/plain": {"schema": PROMPT}}
    ok = content(array(ref("LmiAnswer")) if is_tgi else ref("LmiAnswer"))
    ok |= content(ref("LmiRecord"), JSONLINES, SSE)
    failed = content(ref("Error"), JSON, JSONLINES, SSE)
    described = answers(ok, failed, (LMI_INVALID_STATUS, *OF_INFERENCE))

    def post(path: str) -> Operation:
        return operation(NAME, "Continue a prompt", described, body, names(config.model, path))

    about = "SageMaker's paths with the LMI schema. A stream ends with a record that has generated_text."
    return Door(NAME, about, {path: {"post": post(path)} for path in PATHS}, _schemas(is_tgi))


def _schemas(is_tgi: bool) -> dict[str, Schema]:
    flag, log_prob = ("special", "logprob") if is_tgi else ("special_token", "log_prob")
    token = struct(
        {"id": INTEGER, "text": STRING, log_prob: or_null(NUMBER), flag: BOOLEAN}, *() if is_tgi else (flag,)
    )
    with_top = {**token["properties"], "top_tokens": array(ref("LmiToken"))}
    sequence = {
        "finish_reason": {"enum": ["length", "eos_token", "stop_sequence"]},
        "generated_tokens": INTEGER,
        "tokens": array(ref("LmiToken")),
        "generated_text": STRING,
    }
    details = {
        "finish_reason": {"enum": ["length", "eos_token", "stop_sequence", "error"]},
        "generated_tokens": or_null(INTEGER),
        "inputs": or_null(STRING),
        "tokens": or_null(array(ref("LmiToken"))),
        "prefill": array(struct(with_top, flag, "top_tokens")),
        "top_tokens": array(array(ref("LmiToken"))),
        "best_of_sequences": array(struct(sequence)),
    }
    error = {"error": STRING, "code": INTEGER} | (
        {"error_type": {"enum": ["validation", "generation", "overloaded"]}} if is_tgi else {}
    )
    answer = {"generated_text": STRING, "details": ref("LmiDetails")}
    record = {"token": ref("LmiToken"), "top_tokens": array(ref("LmiToken")), **answer, **error}
    return {
        "LmiRequest": REQUEST,
        "LmiToken": token,
        "LmiDetails": struct(details, "tokens", "prefill", "top_tokens", "best_of_sequences"),
        "LmiAnswer": struct(answer, "details"),
        "LmiRecord": struct(record, "top_tokens", "details", "generated_text", *error),
        "Error": struct({**error, **answer}, *answer),
    }
