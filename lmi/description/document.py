"""/openapi.json: every route of this server with its settings, in OpenAPI 3.1, which generators
read.

Each API has a module. The schemas of requests are made from the tables that read them, so the two
cannot differ. Tests compare the rest with the server: its routes, what it answers to each example,
and whatever schemathesis finds.
"""

import re
from importlib.metadata import version
from typing import Any

from lmi.adapters import routes as adapters
from lmi.apis import batch
from lmi.apis.anthropic import description as anthropic
from lmi.apis.base.media_types import JSON, JSONLINES, SSE
from lmi.apis.base.readers import adapter, json_schema_of
from lmi.apis.embeddings import description as embeddings
from lmi.apis.lmi.api import LMI
from lmi.apis.lmi.schema import PARAMETERS
from lmi.apis.openai import description as openai
from lmi.apis.responses import description as responses
from lmi.apis.table import BY_ROUTE
from lmi.apis.tgi import description as tgi
from lmi.apis.triton import description as triton
from lmi.description.operations import ApiDescription, Operation
from lmi.description.schemas import (
    STRING,
    Content,
    Form,
    Schema,
    answer_object,
    array,
    content,
    either,
    or_null,
    parameter,
    request_object,
    table_schemas,
)
from lmi.duplex.paths import STREAM
from lmi.http.exchange import CUSTOM_ATTRIBUTES, TIMEOUT, TIMEOUT_MS
from lmi.models import description as models
from lmi.server.metrics import MEDIA_TYPE
from lmi.server.page_files import TYPES
from lmi.sessions.http import CLOSE, HEADER, ID, MAX_ID_CHARS, NEW_SESSION
from lmi.settings.config import Config


def document(config: Config) -> dict[str, Any]:
    """Return the whole document, as JSON's objects."""
    apis = [invocations(config)]
    if not config.is_user_code:
        for api in (openai, responses, anthropic, embeddings, tgi, triton):
            apis.append(api.describe(config))

    apis += [adapters.description(config), models.description(config), server(config)]
    schemas: dict[str, Schema] = {}
    for description in apis:
        schemas |= description.schemas

    paths = _paths(apis)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"lmi: {config.model.name}",
            "version": version("lmi"),
            "description": (
                "One model behind every contract that its clients speak. Tags are contracts."
            ),
        },
        "tags": [{"name": api.name, "description": api.about} for api in apis],
        "components": {
            "schemas": schemas,
            "responses": _share_failures(paths),
        },
        "paths": paths,
    }


def _paths(apis: list[ApiDescription]) -> dict[str, dict[str, Operation]]:
    """Return the operations of all APIs, by path and method, with an id for each."""
    paths: dict[str, dict[str, Operation]] = {}
    for api in apis:
        for path, methods in api.paths.items():
            paths.setdefault(path, {}).update(methods)
            for method, operation in methods.items():
                # Generators name a function by it.
                name = f"{method} {path}{'slash' if path.endswith('/') else ''}"
                operation["operationId"] = re.sub(r"\W+", "_", name).strip("_")

    return paths


def _share_failures(paths: dict[str, dict[str, Operation]]) -> dict[str, Any]:
    """Replace repeated error responses by references. Returns the shared responses."""
    shared: dict[str, Any] = {}
    for methods in paths.values():
        for operation in methods.values():
            responses = dict(operation["responses"])
            operation["responses"] = responses
            for status, response in responses.items():
                name = f"{operation['tags'][0]}{status}"
                if status != "200" and shared.setdefault(name, response) == response:
                    responses[status] = {"$ref": f"#/components/responses/{name}"}

    return shared


STATES = ("Healthy", "Draining", "Failed", "Loading", "Restarting", "Unresponsive")
HINTS: dict[str, Form] = {
    **dict.fromkeys(("reason", "stage"), str),
    **dict.fromkeys(("start", "engines", "engines_ready"), int),
    **dict.fromkeys(("progress", "lost_for_s", "silent_s"), float),
}
SCHEMAS = {
    "Health": answer_object({"status": STATES, **HINTS}, optional=HINTS),
    "ExecutionParameters": answer_object(
        {
            "MaxConcurrentTransforms": {"type": "integer", "minimum": 1},
            "BatchStrategy": ("SINGLE_RECORD", "MULTI_RECORD"),
            "MaxPayloadInMB": {"type": "integer", "minimum": 0},
        }
    ),
}
PING = {
    "200": "requests are served",
    "207": "some engines serve (allow_multi_status)",
    "500": "given up, or a fault of the server",
    "503": "not now: the body says why",
}


def server(config: Config) -> ApiDescription:
    """Describe the routes outside the APIs: health, metrics, parameters of batch transforms, and
    this document.
    """
    api = ApiDescription(
        name="server",
        about="How the server is, and what it can be asked.",
        model=config.model,
        schemas=SCHEMAS,
    )
    for method, path in (
        ("get", "/ping"),
        ("post", "/ping"),
        ("get", "/healthz"),
        ("get", "/readyz"),
    ):
        ping = api.add(method, path, "Whether requests are served", "Health")
        for status, meaning in PING.items():
            ping["responses"][status] = {"description": meaning, "content": content("Health")}

    api.add("get", "/livez", "Whether the server has not failed finally", "Health")
    api.add(
        "get", "/version", "The version of the server", content(answer_object({"version": str}))
    )
    api.add(
        "get",
        "/load",
        "The number of requests that are served",
        content(answer_object({"server_load": int})),
    )
    info = answer_object({"version": str, "server": dict, "models": dict})
    api.add(
        "get",
        "/server_info",
        "The settings of the server and its models, without secrets",
        content(info),
    )

    page = {"text/html; charset=utf-8": {"schema": STRING}}
    api.add("get", "/metrics", "Metrics for Prometheus", {MEDIA_TYPE: {"schema": STRING}})
    api.add("get", "/openapi.json", "This description", content(dict))
    api.add("get", "/", "The playground for a browser, links for others", page | content(dict))
    api.add("get", "/playground", "A page to chat with the model", page)
    api.add("get", "/docs", "This description, to read and to try", page)
    files: Content = {}
    for media_type in TYPES.values():
        files[f"{media_type}; charset=utf-8"] = {"schema": STRING}

    api.add("get", "/pages/{name}", "A file of the pages", files)
    api.add(
        "get",
        "/execution-parameters",
        "How a batch transform should send its records",
        "ExecutionParameters",
    )
    websocket = api.add("get", STREAM, "A WebSocket, each message of which is a request", None)
    websocket["responses"]["101"] = {"description": "the WebSocket is open"}
    websocket["responses"]["426"] = {
        "description": "The request does not ask for a WebSocket.",
        "content": api.error,
    }
    return api


PATHS = (
    "/invocations",
    "/predictions/{model}",
    "/predictions/{model}/{version}",
    "/models/{model}/invoke",
)
PROMPT: Schema = {"type": "string", "minLength": 1}
EXAMPLE = {
    "inputs": "What is the capital of France?",
    "parameters": {"max_new_tokens": 8, "details": True},
}
REQUEST = request_object(
    {
        "inputs": PROMPT,
        "stream": bool | None,
        "parameters": or_null(request_object(table_schemas(PARAMETERS))),
        "adapters": {
            **or_null(json_schema_of(adapter)),
            "description": "the name of a loaded LoRA adapter",
        },
    },
    required=("inputs",),
    example=EXAMPLE,
)
BATCH_REQUEST = {
    **REQUEST,
    "properties": REQUEST["properties"]
    | {"inputs": {"anyOf": [PROMPT, {**array(PROMPT), "minItems": 1}]}},
    "examples": [EXAMPLE | {"inputs": [EXAMPLE["inputs"]], "parameters": {"max_new_tokens": 8}}],
}
DURATION: Schema = {"type": "number", "exclusiveMinimum": 0}
OF_HEADERS: tuple[tuple[str, Form, str], ...] = (
    (
        CUSTOM_ATTRIBUTES,
        tuple(f"route={route}" for route in BY_ROUTE),
        "another API for this body: route=" + ", ".join(BY_ROUTE),
    ),
    (
        HEADER,
        {"type": "string", "maxLength": MAX_ID_CHARS, "pattern": f"^({ID.pattern})?$"},
        "the id of an open session; all requests of a session go to one engine",
    ),
    (TIMEOUT, DURATION, "the seconds that the client waits, after which the request ends with 504"),
    (TIMEOUT_MS, DURATION, "the same in milliseconds, as Envoy sends it; the shorter one counts"),
)
HEADERS = [parameter("header", name, form, meaning) for name, form, meaning in OF_HEADERS]
SESSIONS = {
    "SessionRequest": request_object(
        {"requestType": (NEW_SESSION, CLOSE)},
        required=("requestType",),
        example={"requestType": NEW_SESSION},
    ),
    "SessionAnswer": answer_object({"result": str}),
}
ANSWERS = (
    "OpenAIChat",
    "OpenAIText",
    "Response",
    "AnthropicMessage",
    "TgiAnswer",
    "Embeddings",
    "SessionAnswer",
)
EVENTS = ("TgiEvent", "TgiError", "ResponseEvent", "AnthropicEvent", "AnthropicError")
ABOUT = (
    "SageMaker's paths: `inputs` is read by the LMI schema, `messages` and `prompt` by OpenAI's. A "
    "stream is lines, or server-sent events where `output_formatter` or Accept ask for them; "
    "OpenAI's end with `[DONE]`. A body of type application/jsonlines holds a request on each "
    "line, and its answer a line for each, in order."
)
THREE_KEYS = answer_object({"code": int, "message": str, "error": str})
BATCH = {
    "Error": request_object(
        {"error": str, "code": int},
        required=("error", "code"),
    ),
    "BatchRequest": BATCH_REQUEST,
    "BatchAnswer": array(answer_object({"generated_text": str})),
    "BatchRecord": either(answer_object({"outputs": [str]}), "BatchError"),
    "BatchError": THREE_KEYS,
}
ENDS = ("length", "eos_token", "stop_sequence")
TOKENS = ["LmiToken"]


def invocations(config: Config) -> ApiDescription:
    """Describe SageMaker's paths: the LMI schema or the dynamic batch, each with OpenAI's schemas,
    or user code.
    """
    if config.is_user_code:
        return _user_code(config)

    is_tgi = config.model.tgi_compat
    answer: Form = ["LmiAnswer"] if is_tgi else "LmiAnswer"
    request = "LmiRequest"
    record = "LmiRecord"
    error = "Error"
    schemas = _schemas(is_tgi)
    error_rules = LMI.errors
    if config.model.dynamic_batch:
        request = "BatchRequest"
        answer = "BatchAnswer"
        record = "BatchRecord"
        error = "BatchError"
        schemas = BATCH
        error_rules = batch.DYNAMIC_BATCH.errors

    body = content(either(request, "OpenAIChatRequest", "OpenAITextRequest", "SessionRequest"))
    body |= {"text/plain": {"schema": PROMPT}}
    error_schemas = dict.fromkeys((error, "Error", "OpenAIError", "TgiError", "AnthropicError"))
    of_route = {
        "AnswerOfRoute": either(answer, *ANSWERS),
        "LineOfRoute": either(record, "OpenAIChatChunk", "OpenAITextChunk", "OpenAIError"),
        "EventOfRoute": either("LineOfRoute", *EVENTS),
        "ErrorOfRoute": either(*error_schemas),
    }
    answer = content("AnswerOfRoute")
    answer |= content("LineOfRoute", JSONLINES)
    answer |= content("EventOfRoute", SSE, end="[DONE]")
    if config.user_code is not None:
        # A formatter of user code answers what it likes.
        answer |= {"*/*": {}}

    api = ApiDescription(
        name="LMI",
        about=ABOUT,
        model=config.model,
        schemas=schemas | SESSIONS | of_route,
        error=content("ErrorOfRoute", JSON, JSONLINES, SSE),
        rules=[error_rules, *(route.errors for route in BY_ROUTE.values())],
    )
    for path in PATHS:
        api.add_inference(path, "Continue a prompt", answer, body, HEADERS)

    return api


def _user_code(config: Config) -> ApiDescription:
    """Describe user code as the model. It decides what it takes and what it answers."""
    about = "SageMaker's paths, answered by the model's own code."
    anything = {"*/*": Schema()}
    api = ApiDescription(
        name="LMI",
        about=about,
        model=config.model,
        schemas={"Error": THREE_KEYS},
        rules=[LMI.errors],
    )
    for path in PATHS:
        operation = api.add_inference(path, "Ask the model's code", anything, anything)
        operation["responses"]["default"] = {
            "description": "what the model's code answers",
            "content": anything,
        }

    return api


def _schemas(is_tgi: bool) -> dict[str, Schema]:
    flag = "special" if is_tgi else "special_token"
    log_prob = "logprob" if is_tgi else "log_prob"
    token: dict[str, Form] = {"id": int, "text": str, log_prob: float | None, flag: bool}
    optional_flag = () if is_tgi else (flag,)

    details = answer_object(
        {
            "finish_reason": (*ENDS, "error"),
            "generated_tokens": int | None,
            "inputs": str | None,
            "tokens": or_null(TOKENS),
            "prefill": [
                answer_object({**token, "top_tokens": TOKENS}, optional=(flag, "top_tokens"))
            ],
            "top_tokens": [TOKENS],
            "best_of_sequences": [
                answer_object(
                    {
                        "finish_reason": ENDS,
                        "generated_tokens": int,
                        "tokens": TOKENS,
                        "generated_text": str,
                    }
                )
            ],
        },
        optional=("tokens", "prefill", "top_tokens", "best_of_sequences"),
    )

    error: dict[str, Form] = {"error": str, "code": int}
    if is_tgi:
        error["error_type"] = ("validation", "generation", "overloaded")

    answer: dict[str, Form] = {"generated_text": str, "details": "LmiDetails"}
    return {
        "LmiRequest": REQUEST,
        "LmiToken": answer_object(token, optional=optional_flag),
        "LmiDetails": details,
        "LmiAnswer": answer_object(answer, optional=("details",)),
        "LmiRecord": answer_object(
            {"token": "LmiToken", "top_tokens": TOKENS, **answer, **error},
            optional=("top_tokens", *answer, *error),
        ),
        "Error": answer_object({**error, **answer}, optional=answer),
    }
