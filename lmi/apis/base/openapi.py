"""Parts of a description: schemas from readers, answers, operations.

Source of the format: the OpenAPI 3.1 specification, whose schemas are JSON Schema 2020-12. `x-itemSchema`, the
`itemSchema` of 3.2, describes one record of a stream. It describes a server-sent event as an object with the text of
its `data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi import errors
from lmi.apis.base.errors import ErrorRules
from lmi.apis.base.pages import LIMIT, MAX_ITEMS, TOKEN
from lmi.apis.base.parameters import Parameter
from lmi.apis.base.readers import JSON_SCHEMAS
from lmi.settings.config import ModelConfig

Schema = dict[str, Any]
Operation = dict[str, Any]
Causes = Iterable[type[errors.LmiError]]

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
OF_HTTP = {  # what an answer may mean besides the errors of its route
    404: "There is no such path.",
    405: "The path has other methods.",
    408: "The request did not come in time.",
    413: "The body is over `max_request_size`.",
    415: "The body is compressed, or a form in parts.",
    431: "The head of the request is too large.",
    500: "A fault of the server.",
}
OF_ROUTES: Causes = (errors.Overloaded, errors.Unavailable)
OF_INFERENCE: Causes = (
    *(errors.InvalidRequest, errors.UnknownAdapter, errors.UnknownModel),
    *(errors.GenerationFailed, errors.EngineLost, errors.DeadlineExceeded, errors.OutOfMemory),
)


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


def answers(
    ok: Mapping[str, Schema],
    error: Mapping[str, Schema],
    causes: Causes = (),
    rules: Sequence[ErrorRules[Any]] = (),
) -> dict[str, Schema]:
    """Describe all answers of a route: `ok` for 200, `error` for each status that HTTP or one of the causes gives it.

    The status of a cause is its own, or those under the rules of the route's APIs. Its docstring says the reason.
    """
    reasons = {status: [reason] for status, reason in OF_HTTP.items()}
    for cause in (*OF_ROUTES, *causes):
        for status in {each.status_of(cause) for each in rules} or {cause.status}:
            reasons.setdefault(status, []).append((cause.__doc__ or "").partition("\n")[0])
    failed = {
        str(status): {"description": " ".join(reasons[status]), "content": dict(error)} for status in sorted(reasons)
    }
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
