"""/openapi.json: every route of this server with its settings, in OpenAPI 3.1, which generators read.

Each API has a module. The schemas of requests are made from the tables that read them, so the two cannot differ. Tests
compare the rest with the server: its routes, what it answers to each example, and whatever schemathesis finds.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from lmi.adapters import openapi as adapters
from lmi.apis import anthropic, embeddings, tgi
from lmi.apis.openai import api as openai
from lmi.apis.responses import api as responses
from lmi.apis.triton import api as triton
from lmi.description import invocations
from lmi.description.parts import STRING, ApiDescription, Content, Form, Operation, content, struct
from lmi.models import openapi as models
from lmi.server.metrics import MEDIA_TYPE
from lmi.server.routes import pages
from lmi.settings.config import Config


def document(config: Config) -> dict[str, Any]:
    """Return the whole document, as JSON's objects."""
    apis = [invocations.describe(config), adapters.describe(config), models.describe(config), server(config)]
    if not config.is_user_code:
        apis[1:1] = [each.describe(config) for each in (openai, responses, anthropic, embeddings, tgi, triton)]
    paths: dict[str, dict[str, Operation]] = {}
    for path, methods in ((path, methods) for api in apis for path, methods in api.paths.items()):
        paths.setdefault(path, {}).update(methods)
    for path, method, operation in ((path, *each) for path, methods in paths.items() for each in methods.items()):
        operation["operationId"] = _id(method, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"lmi: {config.model.name}",
            "version": version("lmi"),
            "description": "One model behind every contract that its clients speak. Tags are contracts.",
        },
        "tags": [{"name": api.name, "description": api.about} for api in apis],
        "components": {
            "schemas": {name: schema for api in apis for name, schema in api.schemas.items()},
            "responses": _share_failures(paths),
        },
        "paths": paths,
    }


def _id(method: str, path: str) -> str:
    """Return the name of an operation, from which generators make the names of functions: post_v1_completions."""
    return re.sub(r"\W+", "_", f"{method} {path}{'slash' if path.endswith('/') else ''}").strip("_")


def _share_failures(paths: dict[str, dict[str, Operation]]) -> dict[str, Any]:
    """Replace repeated error responses by references. Returns the shared responses."""
    shared: dict[str, Any] = {}
    for operation in (operation for methods in paths.values() for operation in methods.values()):
        responses = operation["responses"] = dict(operation["responses"])
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
    "Health": struct(*HINTS, status=STATES, **HINTS),
    "ExecutionParameters": struct(
        MaxConcurrentTransforms={"type": "integer", "minimum": 1},
        BatchStrategy=("SINGLE_RECORD", "MULTI_RECORD"),
        MaxPayloadInMB={"type": "integer", "minimum": 0},
    ),
}
PING = {
    "200": "requests are served",
    "207": "some engines serve (allow_multi_status)",
    "500": "given up, or a fault of the server",
    "503": "not now: the body says why",
}


def server(config: Config) -> ApiDescription:
    """Describe the routes outside the APIs: health, metrics, parameters of batch transforms, and this document."""
    api = ApiDescription("server", "How the server is, and what it can be asked.", config.model, SCHEMAS)
    for method, path in (("get", "/ping"), ("post", "/ping"), ("get", "/healthz"), ("get", "/readyz")):
        ping = api.add(method, path, "Whether requests are served", "Health")
        ping["responses"] |= {
            status: {"description": text, "content": content("Health")} for status, text in PING.items()
        }
    api.add("get", "/livez", "Whether the server has not failed finally", "Health")
    api.add("get", "/version", "The version of the server", content(struct(version=str)))
    api.add("get", "/load", "The number of requests that are served", content(struct(server_load=int)))
    info = struct(version=str, server=dict, models=dict)
    api.add("get", "/server_info", "The settings of the server and its models, without secrets", content(info))
    page: Content = {"text/html; charset=utf-8": {"schema": STRING}}
    api.add("get", "/metrics", "Metrics for Prometheus", {MEDIA_TYPE: {"schema": STRING}})
    api.add("get", "/openapi.json", "This description", content(dict))
    api.add("get", "/", "The playground for a browser, links for others", page | content(dict))
    api.add("get", "/playground", "A page to chat with the model", page)
    api.add("get", "/docs", "This description, to read and to try", page)
    files: Content = {f"{media_type}; charset=utf-8": {"schema": STRING} for media_type in pages.TYPES.values()}
    api.add("get", "/pages/{name}", "A file of the pages", files)
    parameters = "How a batch transform should send its records"
    api.add("get", "/execution-parameters", parameters, "ExecutionParameters")
    return api
