"""Parts of a description: schemas from readers, answers, operations.

Source of the format: the OpenAPI 3.1 specification, whose schemas are JSON Schema 2020-12.
`x-itemSchema`, the `itemSchema` of 3.2, describes one record of a stream. It describes a
server-sent event as an object with the text of its `data`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any

from lmi import errors
from lmi.apis.base.errors import ErrorRules
from lmi.apis.base.media_types import JSON, SSE
from lmi.apis.base.parameters import Parameter
from lmi.apis.base.readers import json_schema_of
from lmi.settings.config import ModelConfig

Schema = dict[str, Any]
Form = type | UnionType | str | tuple[str, ...] | list[Any] | Schema | None
"""A schema in short, which `schema_of` writes out. As a body it may also be a Content."""
# A schema by media type.
Content = dict[str, Schema]
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
    None: "null",
}
# Keywords that hold of values of all types, so of null too.
OF_ALL_TYPES = {"enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "$ref"}
STRING: Schema = {"type": "string"}
# What an answer may mean besides the errors of its route.
OF_HTTP = {
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

    return {"type": TYPES[form]}


def array(items: Form) -> Schema:
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


def about_defaults(model: ModelConfig) -> str:
    """Return a sentence about the model's defaults, for an API that applies them, or "" where it
    has none.
    """
    defaults = model.generation_defaults
    if not defaults.values:
        return ""

    return f" What a request leaves out is, for this model: {defaults}."


def parameter(place: str, name: str, form: Form, description: str = "") -> Schema:
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
        all_causes: list[type[errors.LmiError]] = [errors.Unavailable, *causes]
        if "{model}" in path:
            all_causes.append(errors.UnknownModel)

        responses: dict[str, Schema] = {}
        if ok:
            responses["200"] = {"description": "the answer", "content": _content(ok)}

        responses |= self._failures(all_causes)
        described: Operation = {"tags": [self.name], "summary": summary, "responses": responses}
        if body:
            described["requestBody"] = {"required": True, "content": _content(body)}

        all_parameters = [*_parameters_of_path(self.model, path), *parameters]
        if all_parameters:
            described["parameters"] = all_parameters

        self.paths.setdefault(path, {})[method] = described
        return described

    def infer(
        self, path: str, summary: str, ok: Form, body: Form, parameters: Iterable[Schema] = ()
    ) -> Operation:
        return self.add("post", path, summary, ok, OF_INFERENCE, body=body, parameters=parameters)

    def _failures(self, causes: Causes) -> dict[str, Schema]:
        """Describe each status that HTTP or a cause gives. The reason is the first paragraph of
        the cause's docstring.
        """
        reasons = {status: [reason] for status, reason in OF_HTTP.items()}
        for cause in dict.fromkeys(causes):
            paragraph = (cause.__doc__ or "").partition("\n\n")[0]
            reason = " ".join(paragraph.split())
            statuses = {rules.status_of(cause) for rules in self.rules} or {cause.status}
            for status in statuses:
                reasons.setdefault(status, []).append(reason)

        failures: dict[str, Schema] = {}
        for status in sorted(reasons):
            description = " ".join(reasons[status])
            failures[str(status)] = {"description": description, "content": self.error}

        return failures


def _content(form: Form) -> Content:
    return form if isinstance(form, dict) else content(form)


def _parameters_of_path(model: ModelConfig, path: str) -> list[Schema]:
    """Return the parameters of a path, with all values that are served here if the server has only
    one model.
    """
    served: dict[str, list[str]] = {}
    if model.path:
        served = {"model": list(model.names), "version": [model.version]}

    parameters: list[Schema] = []
    for name in re.findall(r"{(\w+)}", path):
        schema = STRING
        if name in served:
            schema = {**STRING, "enum": served[name]}

        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})

    return parameters
