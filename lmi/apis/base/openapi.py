"""Parts of a description: schemas from readers, answers, operations.

Source of the format: the OpenAPI 3.1 specification, whose schemas are JSON Schema 2020-12. `x-itemSchema`, the
`itemSchema` of 3.2, describes one record of a stream. It describes a server-sent event as an object with the text of
its `data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi.apis.base.pages import LIMIT, MAX_ITEMS, TOKEN
from lmi.apis.base.parameters import Parameter
from lmi.apis.base.readers import JSON_SCHEMAS
from lmi.settings.config import ModelConfig

Schema = dict[str, Any]
Operation = dict[str, Any]

ITEM_SCHEMA = "x-itemSchema"
JSON, JSONLINES, SSE = "application/json", "application/jsonlines", "text/event-stream"
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
PAGE: list[Schema] = [  # the parameters of a list in pages
    {"name": LIMIT, "in": "query", "schema": {**INTEGER, "minimum": 1, "maximum": MAX_ITEMS}},
    {"name": TOKEN, "in": "query", "schema": {**STRING, "pattern": "^[0-9]{1,9}$"}},
]
REASONS = {
    400: "the request is wrong, and the error says where",
    404: "no such path, or the path names a model or version that is not served here",
    405: "not with this method",
    408: "the request did not come in time",
    409: "the name is taken, or another call changes or removes it now",
    413: "the body is over max_request_size",
    415: "the body is compressed, or a form in parts",
    422: "the request is wrong, and the error says where",
    429: "too many requests (Retry-After)",
    424: "the request is wrong, or the engine failed on it; the error says which",
    431: "the head of the request is too large",
    500: "a fault of the server, or of the engine on this request",
    503: "too many requests (Retry-After), loading, draining, or the engine was lost",
    504: "longer than predict_timeout, or than a model may take to load or to end",
    507: "out of the accelerator's memory, or no room for one more model",
}
OF_HTTP = (404, 405, 408, 413, 415, 431, 500, 503)
OF_INFERENCE = (*OF_HTTP, 504, 507)


@dataclass(frozen=True, slots=True)
class ApiDescription:
    """The part of the document that describes one API."""

    name: str
    about: str
    paths: dict[str, dict[str, Operation]]
    schemas: dict[str, Schema] = field(default_factory=dict)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    """Return the schema with null added, which means "left out"."""
    if not schema:
        return schema
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def struct(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Describe an object of an answer. It has only these properties, and all except the `optional` ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def asked(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Describe an object of a request, which may have further properties."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def taken(table: Mapping[str, Parameter]) -> dict[str, Schema]:
    """Return the schemas of the values that a table takes, each with null added."""
    return {name: or_null(JSON_SCHEMAS.get(row.read, {})) for name, row in table.items()}


def content(schema: Schema, *media_types: str, end: str = "") -> dict[str, Schema]:
    """Return the schema by media type: of the body for JSON, else of one record. `end` is an event that is not JSON."""
    return {media: _medium(schema, media, end) for media in media_types or (JSON,)}


def _medium(schema: Schema, media_type: str, end: str) -> Schema:
    if media_type == JSON:
        return {"schema": schema}
    if not media_type.startswith(SSE):
        return {ITEM_SCHEMA: schema}
    data: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if end:
        data = {"anyOf": [{"const": end}, data]}
    return {ITEM_SCHEMA: {"type": "object", "properties": {"data": data}, "required": ["data"]}}


def answers(ok: Mapping[str, Schema], error: Mapping[str, Schema], statuses: Iterable[int]) -> dict[str, Schema]:
    """Describe all answers of a route: `ok` for 200, `error` for each of the statuses."""
    failed = {str(status): {"description": REASONS[status], "content": dict(error)} for status in sorted(statuses)}
    return {"200": {"description": "the answer", "content": dict(ok)}, **failed}


def operation(
    tag: str,
    summary: str,
    responses: Mapping[str, Schema],
    body: Mapping[str, Schema] | None = None,
    names: Iterable[Schema] = (),
) -> Operation:
    """Describe one operation. `body` holds schemas by media type, `names` the parameters in the path."""
    described: Operation = {"tags": [tag], "summary": summary, "responses": dict(responses)}
    if body is not None:
        described["requestBody"] = {"required": True, "content": dict(body)}
    if names:
        described["parameters"] = list(names)
    return described


def names(model: ModelConfig, path: str) -> list[Schema]:
    """Return the parameters of a path, with all values that are served here if the server has only one model."""
    values = {
        "model": list(model.names),
        "version": [model.version],
    }
    is_known = bool(model.path)
    return [
        {"name": name, "in": "path", "required": True, "schema": {**STRING, "enum": allowed} if is_known else STRING}
        for name, allowed in values.items()
        if f"{{{name}}}" in path
    ]
