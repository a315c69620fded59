"""The JSON of an argument that a model wrote as plain text: a value of a type that the tool's
schema names, else a text.
"""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from lmi.shared.json_references import resolve_pointer

# Models write them in place of JSON's.
LITERALS_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
# Keywords whose values are lists of schemas for the same argument.
COMBINED = ("allOf", "anyOf", "oneOf")
# The types of JSON Schema that a value of each type of Python has.
TYPES_OF_VALUES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}


def argument_json(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """Return the JSON of the argument that a model wrote as `text`.

    `schema` is that of the argument, `root` that of all arguments of the tool, from which
    references lead. A text that is no JSON, or of a type that the schema does not name, stays one.
    """
    stripped = text.strip()
    literal = LITERALS_OF_PYTHON.get(stripped, stripped)
    try:
        value = orjson.loads(literal)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)

    is_string = isinstance(value, str)
    if is_string or types_of_value(value).isdisjoint(types_of_schema(schema, root)):
        return json.dumps(text, ensure_ascii=False)

    return literal


def types_of_value(value: object) -> set[str]:
    """Return the types of JSON Schema that a value has.

    A number without a fraction is an integer, as 5.0 or 20000000000000000000, which orjson reads as
    a float too. Source: JSON Schema 2020-12, Validation, section 6.1.1.
    """
    if isinstance(value, float) and value.is_integer():
        return TYPES_OF_VALUES[int]

    return TYPES_OF_VALUES[type(value)]


def types_of_schema(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names: itself, in the schemas that it combines, or where its
    references lead.
    """
    types = set[str]()
    followed = set[str]()
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue

        types |= _own_types(part)
        for keyword in COMBINED:
            schemas = part.get(keyword)
            if isinstance(schemas, list):
                pending += schemas

        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            pending.append(resolve_pointer(root, reference))

    return types


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema's `type`, or without one those of the values that it lists."""
    if "type" in schema:
        names = schema["type"]
        if not isinstance(names, list):
            names = [names]

        return {name for name in names if isinstance(name, str)}

    values = schema.get("enum")
    if not isinstance(values, list):
        values = []

    if "const" in schema:
        values = [*values, schema["const"]]

    types = set[str]()
    for value in values:
        types |= types_of_value(value)

    return types
