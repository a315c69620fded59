"""The schemas of `/openapi.json`, and short forms in which they are written.

Source of the format: the OpenAPI 3.1 specification, whose schemas are JSON Schema 2020-12.
`x-itemSchema`, the `itemSchema` of 3.2, describes one record of a stream. It describes a
server-sent event as an object with the text of its `data`.
"""

from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Any

from lmi.apis.base.media_types import JSON, SSE
from lmi.apis.base.parameters import Parameter
from lmi.apis.base.readers import json_schema_of

Schema = dict[str, Any]
Form = type | UnionType | str | tuple[str, ...] | list[Any] | Schema | None
"""A schema in short, which `schema_of` writes out. As a body it may also be a Content."""
# A schema by media type.
Content = dict[str, Schema]

ITEM_SCHEMA = "x-itemSchema"
NOTHING: Content = {"text/plain": {"schema": {"type": "string", "maxLength": 0}}}
# The name of a type in JSON Schema
JSON_TYPES: dict[type | None, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    None: "null",
}
# Keywords that hold of values of all types, so of null too.
OF_ALL_TYPES = {"enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "$ref"}
STRING: Schema = {"type": "string"}


def schema_of(form: Form) -> Schema:
    """Return the schema of a type, a union of types, a list `[form]`, one of the texts
    `("a", "b")` or a component. Raises KeyError for a type that JSON does not have.
    """
    if isinstance(form, dict):
        return form

    if isinstance(form, str):
        return {"$ref": f"#/components/schemas/{form}"}

    if isinstance(form, list):
        [items] = form
        return array(items)

    if isinstance(form, tuple):
        return {"enum": list(form)}

    if isinstance(form, UnionType):
        types = [kind for kind in form.__args__ if kind is not NoneType]
        schema = either(*types) if len(types) > 1 else schema_of(types[0])
        return or_null(schema) if NoneType in form.__args__ else schema

    return {"type": JSON_TYPES[form]}


def array(items: Form) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": schema_of(items)}


def or_null(form: Form) -> Schema:
    """Return the schema with null added, which means "left out"."""
    schema = schema_of(form)
    if not schema:
        return schema

    if schema.keys() == {"enum"}:
        return {"enum": [*schema["enum"], None]}

    if isinstance(schema.get("type"), str) and schema.keys().isdisjoint(OF_ALL_TYPES):
        return {**schema, "type": [schema["type"], "null"]}

    return {"anyOf": [schema, {"type": "null"}]}


def either(*forms: Form) -> Schema:
    """Return the schema of what has one of these forms."""
    return {"anyOf": list(map(schema_of, forms))}


def answer_object(properties: Mapping[str, Form], *, optional: Collection[str] = ()) -> Schema:
    """Describe an object of an answer. It has these properties and no others, and always all that
    are not `optional`.
    """
    required = [name for name in properties if name not in optional]
    return {**request_object(properties, required=required), "additionalProperties": False}


def request_object(
    properties: Mapping[str, Form], *, required: Collection[str] = (), example: object = None
) -> Schema:
    """Describe an object of a request, which may have further properties."""
    schemas = {name: schema_of(form) for name, form in properties.items()}
    described: Schema = {"type": "object", "properties": schemas, "required": list(required)}
    if example is not None:
        described["examples"] = [example]

    return described


# What an event of a stream has beside while there is no token.
WAITING: dict[str, Form] = {
    "prompt_progress": answer_object(
        {"total": int, "cache": int, "processed": int, "time_ms": int}
    ),
    "queue_status": answer_object({"queue_position": int, "estimated_wait_seconds": float | None}),
}


def table_schemas(table: Mapping[str, Parameter]) -> dict[str, Schema]:
    """Return the schemas of the values that a table takes, each with null added and with what it
    means.
    """
    schemas: dict[str, Schema] = {}
    for name, row in table.items():
        schema = or_null(json_schema_of(row.read))
        if row.help:
            schema = {**schema, "description": row.help}

        schemas[name] = schema

    return schemas


def parameter(place: str, name: str, form: Form, description: str = "") -> Schema:
    """Describe a parameter of an operation. `place` is "path", "query" or "header"."""
    described: Schema = {"name": name, "in": place, "schema": schema_of(form)}
    if description:
        described["description"] = description

    return described


def content(form: Form, *media_types: str, end: str = "") -> Content:
    """Return the schema by media type: of the body for JSON, else of one record. `end` is an event
    that is not JSON.
    """
    schema = schema_of(form)
    return {media: _medium(schema, media, end) for media in media_types or (JSON,)}


def _medium(schema: Schema, media_type: str, end: str) -> Schema:
    """Return what a body of a media type holds, of which the schema is that of JSON or a record."""
    if media_type == JSON:
        return {"schema": schema}

    if not media_type.startswith(SSE):
        return {ITEM_SCHEMA: schema}

    data: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if end:
        data = {"anyOf": [{"const": end}, data]}

    return {ITEM_SCHEMA: {"type": "object", "properties": {"data": data}, "required": ["data"]}}
