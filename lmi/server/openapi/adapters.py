"""The routes that register LoRA adapters. Parameters of a POST are in the query or in the body."""

from __future__ import annotations

from lmi.apis.base.openapi import (
    BOOLEAN,
    PAGE,
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
    ref,
    struct,
)
from lmi.apis.base.readers import JSON_SCHEMAS, boolean, text
from lmi.engine.registry import AdapterUnusable, NameTaken, NotRegistered
from lmi.errors import DeadlineExceeded, InvalidRequest, OutOfMemory
from lmi.server.adapter_choice import ALIAS
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN

NAME = "adapters"
READING = (InvalidRequest, NotRegistered)
CHANGING = (*READING, NameTaken, AdapterUnusable, DeadlineExceeded, OutOfMemory)
TEXT, FLAG = JSON_SCHEMAS[text], JSON_SCHEMAS[boolean]
SETTINGS: dict[str, Schema] = {"preload": {**FLAG, "default": True}, "pin": {**FLAG, "default": False}}
SRC = {
    **TEXT,
    "description": "a LoRA adapter: a folder below the model's, /opt/ml, download_dir or adapter_roots; "
    "owner/name of a hub; s3://bucket/prefix; s3://bucket/key.tar.gz",
}
NEW: dict[str, Schema] = {"name": {**TEXT, "pattern": f"^{NAME_PATTERN}$"}, "src": SRC, **SETTINGS}
ADAPTER_NAME: Schema = {"name": "adapter", "in": "path", "required": True, "schema": STRING}
SAID: Schema = {
    "name": ALIAS,
    "in": "header",
    "description": "replaces the adapter's name in messages",
    "schema": STRING,
}
SCHEMAS: dict[str, Schema] = {
    "Adapter": struct({"name": STRING, "src": STRING, "preload": BOOLEAN, "pin": BOOLEAN, "reason": STRING}, "reason"),
    "Adapters": struct({"adapters": array(ref("Adapter")), "nextPageToken": STRING}, "nextPageToken"),
    "AdapterChange": struct({"status": STRING, "warning": STRING}, "warning"),
}


def describe(config: Config) -> ApiDescription:
    paths = {}
    for prefix in ("/adapters", "/models/{model}/adapters"):
        model = names(config.model, prefix)
        one = [*model, ADAPTER_NAME]
        paths[prefix] = {
            "get": _reading("List the registered adapters", "Adapters", [*model, *PAGE]),
            "post": _changing("Register an adapter", model, NEW),
        }
        paths[f"{prefix}/{{adapter}}"] = {
            "get": _reading("Describe a registered adapter", "Adapter", one),
            "delete": _changing("Unregister an adapter", one),
        }
        paths[f"{prefix}/{{adapter}}/update"] = {"post": _changing("Pin or preload an adapter", one, SETTINGS)}
    return ApiDescription(NAME, "LoRA adapters of the model, changed while the server runs.", paths, SCHEMAS)


def _reading(summary: str, schema: str, places: list[Schema]) -> Operation:
    return operation(NAME, summary, answers(content(ref(schema)), content(ref("Error")), READING), names=places)


def _changing(summary: str, places: list[Schema], parameters: dict[str, Schema] | None = None) -> Operation:
    """Describe a change. Each of its parameters may stand in the query or in the body."""
    described = answers(content(ref("AdapterChange")), content(ref("Error")), CHANGING)
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in (parameters or {}).items()]
    change = operation(NAME, summary, described, names=[*places, *in_query, SAID])
    if parameters:
        change["requestBody"] = {"required": False, "content": content(asked(parameters))}
    return change
