"""Finds in a JSON schema what xgrammar would leave out, so that the schema is refused and not followed in part.

`oneOf` is followed as `anyOf`, a `format` as the shape of its texts, and an unknown one as any string. Written
against xgrammar 0.2.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

NOT_KNOWN = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef")
NEED_A_TYPE = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern format minItems maxItems "
    "required minProperties maxProperties patternProperties propertyNames".split()
)
IMPLY_A_TYPE = frozenset({"properties", "additionalProperties", "items", "prefixItems"})
CHOICES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # xgrammar reads the first of them and nothing beside it
NOT_TOGETHER = (
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    ("format", "minLength"),
    ("format", "maxLength"),
    ("properties", "propertyNames"),
    ("multipleOf", "minimum"),
    ("multipleOf", "maximum"),
    ("multipleOf", "exclusiveMinimum"),
    ("multipleOf", "exclusiveMaximum"),
)
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
# Of the values that are read here. xgrammar refuses wrong types itself.
TYPES = {"required": list, "allOf": list, "properties": dict, "patternProperties": dict, "pattern": str}
SINGLE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")


def check_keywords(text: str) -> list[str]:
    """Return the regular expressions of a JSON schema, given as its text.

    Raises ValueError if the schema has a part that xgrammar would leave out.
    """
    patterns: list[str] = []
    pending = [json.loads(text)]
    while pending:
        schema = pending.pop()
        if isinstance(schema, dict):
            for fault in _faults(schema):
                raise ValueError(f"{fault} cannot be followed")
            patterns += [*schema.get("patternProperties", ()), *([schema["pattern"]] if "pattern" in schema else [])]
            pending += _parts(schema)
    return patterns


def _faults(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in TYPES.items():
        if name in schema and not isinstance(schema[name], kind):
            yield f"{name} of a wrong type"
    yield from (name for name in NOT_KNOWN if name in schema)
    yield from (f"{one} beside {other}" for one, other in NOT_TOGETHER if one in schema and other in schema)
    rules = [name for name in schema if name in NEED_A_TYPE or name in IMPLY_A_TYPE]
    choices = [name for name in CHOICES if name in schema]
    yield from (f"{choices[0]} beside {name}" for name in [*choices[1:], *rules] if choices)
    if "type" not in schema and not choices and not IMPLY_A_TYPE & schema.keys():
        yield from (f"{name} without type" for name in rules)
    if schema.get("uniqueItems"):
        yield "uniqueItems"
    if len(schema.get("allOf", ())) > 1:
        yield "allOf of several schemas"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf without the type integer"
    if "$ref" in schema and not (schema["$ref"] == "#" or str(schema["$ref"]).startswith("#/")):
        yield f"$ref {schema['$ref']}"
    for name in schema.get("required", ()):
        if not isinstance(name, str) or name not in schema.get("properties", {}):
            yield f"required {name!r}, which is not among the properties,"


def _parts(schema: Mapping[str, Any]) -> Iterator[object]:
    """The schemas in a schema."""
    for name in OF_SCHEMAS:
        if isinstance(inner := schema.get(name), dict):
            yield from inner.values()
    for name in LISTS:
        if isinstance(inner := schema.get(name), list):
            yield from inner
    yield from (schema[name] for name in SINGLE if name in schema)
    if isinstance(inner := schema.get("propertyNames"), dict):
        yield {"type": "string", **inner}
