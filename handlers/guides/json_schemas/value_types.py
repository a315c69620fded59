"""The types of the values that fit a schema: those that it names, or that its keywords imply."""

from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import COMBINED
from handlers.guides.json_schemas.subschema import Schema
from lmi.errors import shorten

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
# The keywords that say that a value is an object, or an array.
ABOUT_OBJECTS = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "properties",
        "propertyNames",
    }
)
ABOUT_ARRAYS = frozenset({"contains", "items", "prefixItems"})


def types_of(keywords: Schema, *, is_alone: bool) -> Schema:
    """The rule `type`, {} where a value may have any type."""
    if "type" not in keywords:
        return _implied_types(keywords) if is_alone else {}

    types = keywords["type"]
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            raise SchemaFault(f"type {shorten(name)}")

    return {"type": types}


def _implied_types(keywords: Schema) -> Schema:
    if keywords.keys() & {*COMBINED, "enum", "const"}:
        return {}

    if keywords.keys() & ABOUT_OBJECTS:
        return {"type": "object"}

    if keywords.keys() & ABOUT_ARRAYS:
        return {"type": "array"}

    return {}
