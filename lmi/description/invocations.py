"""SageMaker's paths.

The server's settings decide what is described: the LMI schema or the dynamic-batch schema, each together with OpenAI's
schemas, or user code.
"""

from __future__ import annotations

from lmi.apis.base.formatter import JSON, JSONLINES, SSE
from lmi.apis.base.readers import JSON_SCHEMAS, adapter
from lmi.apis.batch import DYNAMIC_BATCH
from lmi.apis.lmi.api import LMI
from lmi.apis.lmi.schema import PARAMETERS
from lmi.apis.table import BY_ROUTE
from lmi.description.parts import (
    ApiDescription,
    Form,
    Schema,
    array,
    asked,
    content,
    either,
    or_null,
    parameter,
    struct,
    taken,
)
from lmi.http.exchange import CUSTOM_ATTRIBUTES, TIMEOUT, TIMEOUT_MS
from lmi.sessions.http import CLOSE, HEADER, ID, MAX_ID_CHARS, NEW_SESSION
from lmi.settings.config import Config

PATHS = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
PROMPT: Schema = {"type": "string", "minLength": 1}
EXAMPLE = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 8, "details": True}}
REQUEST = asked(
    {
        "inputs": PROMPT,
        "stream": bool | None,
        "parameters": or_null(asked(taken(PARAMETERS))),
        "adapters": {**or_null(JSON_SCHEMAS[adapter]), "description": "the name of a loaded LoRA adapter"},
    },
    "inputs",
    example=EXAMPLE,
)
BATCH_REQUEST = {
    **REQUEST,
    "properties": REQUEST["properties"] | {"inputs": {"anyOf": [PROMPT, {**array(PROMPT), "minItems": 1}]}},
    "examples": [EXAMPLE | {"inputs": [EXAMPLE["inputs"]], "parameters": {"max_new_tokens": 8}}],
}
DURATION: Schema = {"type": "number", "exclusiveMinimum": 0}
HEADERS = (
    parameter(
        "header",
        CUSTOM_ATTRIBUTES,
        tuple(f"route={route}" for route in BY_ROUTE),
        "another API for this body: route=" + ", ".join(BY_ROUTE),
    ),
    parameter(
        "header",
        HEADER,
        {"type": "string", "maxLength": MAX_ID_CHARS, "pattern": f"^({ID.pattern})?$"},
        "the id of an open session; all requests of a session go to one engine",
    ),
    parameter("header", TIMEOUT, DURATION, "the seconds that the client waits, after which the request ends with 504"),
    parameter("header", TIMEOUT_MS, DURATION, "the same in milliseconds, as Envoy sends it; the shorter one counts"),
)
SESSIONS = {
    "SessionRequest": asked({"requestType": (NEW_SESSION, CLOSE)}, "requestType", example={"requestType": NEW_SESSION}),
    "SessionAnswer": struct(result=str),
}
ANSWERS = ("OpenAIChat", "OpenAIText", "Response", "AnthropicMessage", "TgiAnswer", "Embeddings", "SessionAnswer")
EVENTS = ("TgiEvent", "TgiError", "ResponseEvent", "AnthropicEvent", "AnthropicError")
ABOUT = (
    "SageMaker's paths: `inputs` is read by the LMI schema, `messages` and `prompt` by OpenAI's. A stream is "
    "lines, or server-sent events where `output_formatter` or Accept ask for them; OpenAI's end with `[DONE]`. "
    "A body of type application/jsonlines holds a request on each line, and its answer a line for each, in order."
)
THREE_KEYS = struct(code=int, message=str, error=str)
BATCH = {
    "Error": asked({"error": str, "code": int}, "error", "code"),
    "BatchRequest": BATCH_REQUEST,
    "BatchAnswer": array(struct(generated_text=str)),
    "BatchRecord": either(struct(outputs=[str]), "BatchError"),
    "BatchError": THREE_KEYS,
}
ENDS = ("length", "eos_token", "stop_sequence")
TOKENS = ["LmiToken"]


def describe(config: Config) -> ApiDescription:
    if config.is_user_code:
        return _user_code(config)
    is_tgi, is_batch = config.model.tgi_compat, config.model.dynamic_batch
    answer: Form = ["LmiAnswer"] if is_tgi else "LmiAnswer"
    request, record, error = "LmiRequest", "LmiRecord", "Error"
    if is_batch:
        request, answer, record, error = "BatchRequest", "BatchAnswer", "BatchRecord", "BatchError"
    body = content(either(request, "OpenAIChatRequest", "OpenAITextRequest", "SessionRequest"))
    body |= {"text/plain": {"schema": PROMPT}}
    of_route = {
        "AnswerOfRoute": either(answer, *ANSWERS),
        "LineOfRoute": either(record, "OpenAIChatChunk", "OpenAITextChunk", "OpenAIError"),
        "EventOfRoute": either("LineOfRoute", *EVENTS),
        "ErrorOfRoute": either(*dict.fromkeys((error, "Error", "OpenAIError", "TgiError", "AnthropicError"))),
    }
    ok = content("AnswerOfRoute") | content("LineOfRoute", JSONLINES) | content("EventOfRoute", SSE, end="[DONE]")
    if config.user_code is not None:
        ok |= {"*/*": {}}  # its formatter's
    rules = [api.errors for api in (DYNAMIC_BATCH if is_batch else LMI, *BY_ROUTE.values())]
    schemas = (BATCH if is_batch else _schemas(is_tgi)) | SESSIONS | of_route
    api = ApiDescription("LMI", ABOUT, config.model, schemas, content("ErrorOfRoute", JSON, JSONLINES, SSE), rules)
    for path in PATHS:
        api.infer(path, "Continue a prompt", ok, body, HEADERS)
    return api


def _user_code(config: Config) -> ApiDescription:
    """Describe user code as the model. It decides what it takes and what it answers."""
    about, anything = "SageMaker's paths, answered by the model's own code.", {"*/*": Schema()}
    api = ApiDescription("LMI", about, config.model, {"Error": THREE_KEYS}, rules=[LMI.errors])
    for path in PATHS:
        asks = api.infer(path, "Ask the model's code", anything, anything)
        asks["responses"]["default"] = {"description": "what the model's code answers", "content": anything}
    return api


def _schemas(is_tgi: bool) -> dict[str, Schema]:
    flag, log_prob = ("special", "logprob") if is_tgi else ("special_token", "log_prob")
    token: dict[str, Form] = {"id": int, "text": str, log_prob: float | None, flag: bool}
    details = struct(
        *("tokens", "prefill", "top_tokens", "best_of_sequences"),
        finish_reason=(*ENDS, "error"),
        generated_tokens=int | None,
        inputs=str | None,
        tokens=or_null(TOKENS),
        prefill=[struct(flag, "top_tokens", **token, top_tokens=TOKENS)],
        top_tokens=[TOKENS],
        best_of_sequences=[struct(finish_reason=ENDS, generated_tokens=int, tokens=TOKENS, generated_text=str)],
    )
    error: dict[str, Form] = {"error": str, "code": int}
    error |= {"error_type": ("validation", "generation", "overloaded")} if is_tgi else {}
    answer: dict[str, Form] = {"generated_text": str, "details": "LmiDetails"}
    return {
        "LmiRequest": REQUEST,
        "LmiToken": struct(*() if is_tgi else (flag,), **token),
        "LmiDetails": details,
        "LmiAnswer": struct("details", **answer),
        "LmiRecord": struct("top_tokens", *answer, *error, token="LmiToken", top_tokens=TOKENS, **answer, **error),
        "Error": struct(*answer, **error, **answer),
    }
