"""Parts of a description: schemas from readers, answers, operations.

Source of the format: the OpenAPI 3.1 specification, whose schemas are JSON Schema 2020-12.
`x-itemSchema`, the `itemSchema` of 3.2, describes one record of a stream. It describes a
server-sent event as an object with the text of its `data`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from lmi import errors
from lmi.apis.base.api import JSON, SSE, ErrorRules
from lmi.apis.base.parameters import Parameter
from lmi.apis.base.readers import json_schema_of
from lmi.settings.config import ModelConfig

Schema = dict[str, Any]
Form = type | UnionType | str | tuple[str, ...] | list[Any] | Schema | None
"""A schema in short, which `schema_of` writes out. As a body it may also be a Content."""
Content = dict[str, Schema]  # by media type
Operation = dict[str, Any]
Causes = Iterable[type[errors.LmiError]]

ITEM_SCHEMA = "x-itemSchema"
NOTHING: Content = {"text/plain": {"schema": {"type": "string", "maxLength": 0}}}
TYPES: dict[type | None, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
}
STRING: Schema = {"type": "string"}
OF_HTTP = {  # what an answer may mean besides the errors of its route
    404: "There is no such path.",
    405: "The path has other methods.",
    408: "The request did not come in time.",
    413: "The body is over `max_request_size`.",
    415: "The body is compressed, or a form in parts.",
    431: "The head of the request is too large.",
    500: "A fault of the server.",
}
OF_INFERENCE: Causes = (
    errors.InvalidRequest,
    errors.Unauthorized,
    errors.ForeignPage,
    errors.UnknownAdapter,
    errors.UnknownModel,
    errors.Overloaded,
    errors.GenerationFailed,
    errors.EngineLost,
    errors.DeadlineExceeded,
    errors.OutOfMemory,
)


def schema_of(form: Form) -> Schema:
    """Return the schema of a type, `type | None`, a list `[form]`, one of the texts `("a", "b")` or
    a component.
    """
    if isinstance(form, dict):
        return form

    if isinstance(form, str):
        return {"$ref": f"#/components/schemas/{form}"}

    if isinstance(form, list):
        return array(form[0])

    if isinstance(form, tuple):
        return {"enum": list(form)}

    return (
        or_null(form.__args__[0])
        if isinstance(form, UnionType)
        else {"type": TYPES.get(form, "null")}
    )


def array(items: Form) -> Schema:
    return {"type": "array", "items": schema_of(items)}


def or_null(form: Form) -> Schema:
    """Return the schema with null added, which means "left out"."""
    schema = schema_of(form)
    if not schema:
        return schema

    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}

    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}

    return {"anyOf": [schema, {"type": "null"}]}


def either(*forms: Form) -> Schema:
    return {"anyOf": list(map(schema_of, forms))}


def struct(*optional: str, **properties: Form) -> Schema:
    """Describe an object of an answer. It has only these properties, and all except the `optional`
    ones.
    """
    required = [name for name in properties if name not in optional]
    return {**asked(properties, *required), "additionalProperties": False}


def asked(properties: Mapping[str, Form], *required: str, example: object = None) -> Schema:
    """Describe an object of a request, which may have further properties."""
    schemas = {name: schema_of(form) for name, form in properties.items()}
    described: Schema = {"type": "object", "properties": schemas, "required": list(required)}
    return described if example is None else {**described, "examples": [example]}


WAITING: dict[str, Form] = {  # what an event of a stream has beside while there is no token
    "prompt_progress": struct(**dict.fromkeys(("total", "cache", "processed", "time_ms"), int)),
    "queue_status": struct(queue_position=int, estimated_wait_seconds=float | None),
}


def taken(table: Mapping[str, Parameter]) -> dict[str, Schema]:
    """Return the schemas of the values that a table takes, each with null added and with what it
    means.
    """
    return {
        name: or_null(json_schema_of(row.read)) | ({"description": row.help} if row.help else {})
        for name, row in table.items()
    }


def about_defaults(model: ModelConfig) -> str:
    """Return a sentence about the model's defaults, for an API that applies them, or "" where it
    has none.
    """
    defaults = model.generation_defaults
    return f" What a request leaves out is, for this model: {defaults}." if defaults.values else ""


def parameter(place: str, name: str, form: Form, description: str = "") -> Schema:
    described = {"name": name, "in": place, "schema": schema_of(form)}
    return {**described, "description": description} if description else described


def content(form: Form, *media_types: str, end: str = "") -> Content:
    """Return the schema by media type: of the body for JSON, else of one record. `end` is an event
    that is not JSON.
    """
    return {media: _medium(schema_of(form), media, end) for media in media_types or (JSON,)}


def _medium(schema: Schema, media_type: str, end: str) -> Schema:
    if media_type == JSON:
        return {"schema": schema}

    if not media_type.startswith(SSE):
        return {ITEM_SCHEMA: schema}

    data: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if end:
        data = {"anyOf": [{"const": end}, data]}

    return {ITEM_SCHEMA: {"type": "object", "properties": {"data": data}, "required": ["data"]}}


@dataclass(frozen=True, slots=True)
class ApiDescription:
    """The part of the document that describes one API.

    `error` is the content of a failure. Its status is that of the LmiError, or those under the
    `rules` of APIs.
    """

    name: str
    about: str
    model: ModelConfig
    schemas: dict[str, Schema]
    error: Content = field(default_factory=lambda: content("Error"))
    rules: Sequence[ErrorRules] = ()
    paths: dict[str, dict[str, Operation]] = field(default_factory=dict)

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        ok: Form,
        causes: Causes = (),
        *,
        body: Form = None,
        parameters: Iterable[Schema] = (),
    ) -> Operation:
        """Describe an operation, whose failures have these causes and those of every route. Without
        `ok` it fails.
        """
        causes = (
            errors.Unavailable,
            *causes,
            *([errors.UnknownModel] if "{model}" in path else ()),
        )
        answers = {"200": {"description": "the answer", "content": _content(ok)}} if ok else {}
        responses = answers | self._failures(causes)
        described: Operation = {"tags": [self.name], "summary": summary, "responses": responses}
        if body:
            described["requestBody"] = {"required": True, "content": _content(body)}

        if parameters := [*_names(self.model, path), *parameters]:
            described["parameters"] = parameters

        self.paths.setdefault(path, {})[method] = described
        return described

    def infer(
        self, path: str, summary: str, ok: Form, body: Form, parameters: Iterable[Schema] = ()
    ) -> Operation:
        return self.add("post", path, summary, ok, OF_INFERENCE, body=body, parameters=parameters)

    def _failures(self, causes: Causes) -> dict[str, Schema]:
        """Describe each status that HTTP or a cause gives. The reason is the first line of the
        cause's docstring.
        """
        reasons = {status: [reason] for status, reason in OF_HTTP.items()}
        for cause in dict.fromkeys(causes):
            for status in {rules.status_of(cause) for rules in self.rules} or {cause.status}:
                reasons.setdefault(status, []).append((cause.__doc__ or "").partition("\n")[0])

        return {
            str(status): {"description": " ".join(reasons[status]), "content": self.error}
            for status in sorted(reasons)
        }


def _content(form: Form) -> Content:
    return form if isinstance(form, dict) else content(form)


def _names(model: ModelConfig, path: str) -> list[Schema]:
    """Return the parameters of a path, with all values that are served here if the server has only
    one model.
    """
    served = {"model": list(model.names), "version": [model.version]} if model.path else {}
    named = re.findall(r"{(\w+)}", path)
    schemas = {name: STRING | ({"enum": served[name]} if name in served else {}) for name in named}
    return [
        {"name": name, "in": "path", "required": True, "schema": schemas[name]} for name in named
    ]
