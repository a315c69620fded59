"""SageMaker's paths.

The server's settings decide what is described: the LMI schema or the dynamic-batch schema, each together with OpenAI's
schemas, or user code.
"""

from __future__ import annotations

from lmi.apis.base.openapi import (
    BOOLEAN,
    INTEGER,
    JSON,
    JSONLINES,
    NUMBER,
    OF_INFERENCE,
    SSE,
    STRING,
    ApiDescription,
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
from lmi.apis.base.readers import JSON_SCHEMAS, adapter
from lmi.apis.batch.api import DYNAMIC_BATCH
from lmi.apis.lmi.api import LMI
from lmi.apis.lmi.schema import PARAMETERS
from lmi.apis.lmi.sessions import CLOSE, HEADER, ID, MAX_ID_CHARS, NEW_SESSION
from lmi.apis.table import BY_ROUTE
from lmi.http.exchange import CUSTOM_ATTRIBUTES
from lmi.settings.config import Config

NAME = "LMI"
PATHS = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
PROMPT: Schema = {"type": "string", "minLength": 1}
EXAMPLE = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 8, "details": True}}
REQUEST = {
    **asked(
        {
            "inputs": PROMPT,
            "stream": or_null(BOOLEAN),
            "parameters": or_null(asked(taken(PARAMETERS))),
            "adapters": {**or_null(JSON_SCHEMAS[adapter]), "description": "the name of a loaded LoRA adapter"},
        },
        "inputs",
    ),
    "examples": [EXAMPLE],
}


BATCH_EXAMPLE = EXAMPLE | {"inputs": [EXAMPLE["inputs"]], "parameters": {"max_new_tokens": 8}}
BATCH_REQUEST = {
    **REQUEST,
    "properties": REQUEST["properties"] | {"inputs": {"anyOf": [PROMPT, {**array(PROMPT), "minItems": 1}]}},
    "examples": [BATCH_EXAMPLE],
}
ROUTE: Schema = {
    "name": CUSTOM_ATTRIBUTES,
    "in": "header",
    "description": "another API for this body: route=" + ", ".join(BY_ROUTE),
    "schema": {"enum": [f"route={route}" for route in BY_ROUTE]},
}
SESSION: Schema = {
    "name": HEADER,
    "in": "header",
    "description": "the id of an open session; all requests of a session go to one engine",
    "schema": {"type": "string", "maxLength": MAX_ID_CHARS, "pattern": f"^({ID.pattern})?$"},
}
SESSION_REQUEST = {**asked({"requestType": {"enum": [NEW_SESSION, CLOSE]}}, "requestType")}
SESSION_REQUEST["examples"] = [{"requestType": NEW_SESSION}]
SESSIONS: dict[str, Schema] = {"SessionRequest": SESSION_REQUEST, "SessionAnswer": struct({"result": STRING})}
OPENAI, OPENAI_CHUNKS = (
    (ref("OpenAIChat"), ref("OpenAIText")),
    (ref("OpenAIChatChunk"), ref("OpenAITextChunk"), ref("OpenAIError")),
)


def describe(config: Config) -> ApiDescription:
    if config.is_user_code:
        return _user_code(config)
    is_tgi, is_batch = config.model.tgi_compat, config.model.dynamic_batch
    whole = array(ref("LmiAnswer")) if is_tgi else ref("LmiAnswer")
    request, answer, record, error = (
        (ref("BatchRequest"), ref("BatchAnswer"), ref("BatchRecord"), ref("BatchError"))
        if is_batch
        else (ref("LmiRequest"), whole, ref("LmiRecord"), ref("Error"))
    )
    body = _any(request, ref("OpenAIChatRequest"), ref("OpenAITextRequest"), ref("SessionRequest"))
    body |= {"text/plain": {"schema": PROMPT}}
    ok = _any(answer, *OPENAI, ref("TgiAnswer"), ref("SessionAnswer"))
    ok |= content({"anyOf": [record, *OPENAI_CHUNKS]}, JSONLINES)
    ok |= content({"anyOf": [record, *OPENAI_CHUNKS, ref("TgiEvent")]}, SSE, end="[DONE]")
    if config.user_code is not None:
        ok |= {"*/*": {}}  # its formatter's
    failed = content({"anyOf": [error, ref("Error"), ref("OpenAIError"), ref("TgiError")]}, JSON, JSONLINES)
    failed |= content({"anyOf": [error, ref("Error"), ref("OpenAIError"), ref("TgiError")]}, SSE, end="[DONE]")
    own = DYNAMIC_BATCH if is_batch else LMI
    described = answers(ok, failed, OF_INFERENCE, [api.errors for api in (own, *BY_ROUTE.values())])

    def post(path: str) -> Operation:
        return operation(NAME, "Continue a prompt", described, body, [*names(config.model, path), ROUTE, SESSION])

    about = (
        "SageMaker's paths: `inputs` is read by the LMI schema, `messages` and `prompt` by OpenAI's. A stream is "
        "lines, or server-sent events where `output_formatter` or Accept ask for them; OpenAI's end with `[DONE]`. "
        "A body of type application/jsonlines holds a request on each line, and its answer a line for each, in order."
    )
    schemas = BATCH if is_batch else _schemas(is_tgi)
    return ApiDescription(NAME, about, {path: {"post": post(path)} for path in PATHS}, schemas | SESSIONS)


def _any(*schemas: Schema) -> dict[str, Schema]:
    return content({"anyOf": list(schemas)})


def _user_code(config: Config) -> ApiDescription:
    """Describe user code as the model. It decides what it takes and what it answers."""
    described = answers({"*/*": {}}, content(ref("Error")), OF_INFERENCE, [LMI.errors])
    described["default"] = {"description": "what the model's code answers", "content": {"*/*": {}}}

    def post(path: str) -> Operation:
        return operation(NAME, "Ask the model's code", described, {"*/*": {}}, names(config.model, path))

    about = "SageMaker's paths, answered by the model's own code."
    return ApiDescription(NAME, about, {path: {"post": post(path)} for path in PATHS}, {"Error": THREE_KEYS})


THREE_KEYS = struct({"code": INTEGER, "message": STRING, "error": STRING})
PLAIN_ERROR = asked({"error": STRING, "code": INTEGER}, "error", "code")
BATCH: dict[str, Schema] = {
    "Error": PLAIN_ERROR,
    "BatchRequest": BATCH_REQUEST,
    "BatchAnswer": array(struct({"generated_text": STRING})),
    "BatchRecord": {"anyOf": [struct({"outputs": array(STRING)}), ref("BatchError")]},
    "BatchError": THREE_KEYS,
}


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
