"""Whether no value fits two JSON schemas at once, as far as types, listed values and required
properties show it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Resolve = Callable[[str], object]
TYPES = frozenset("null boolean object array number string".split())  # an integer is a number
KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
MAX_LEVELS = 4


def are_disjoint(one: object, other: object, resolve: Resolve, level: int = 0) -> bool:
    """`resolve` gives the schema of a reference. False where it is not known."""
    if one is False or other is False:
        return True

    parts = list(conjuncts(one, resolve))
    others = list(conjuncts(other, resolve))
    types = TYPES.intersection(*map(_types, parts + others))
    if not types:
        return True

    is_object = types == {"object"} and level <= MAX_LEVELS
    return any(
        _have_other_values(part, against)
        or (is_object and _have_other_properties(part, against, resolve, level))
        for part in parts
        for against in others
    )


def required_of(schema: object, resolve: Resolve) -> set[str]:
    """The names that every value has; none where not every value is known to be an object."""
    parts = list(conjuncts(schema, resolve))
    is_object = set(TYPES).intersection(*map(_types, parts)) == {"object"}
    return {name for part in parts for name in part.get("required", ())} if is_object else set()


def conjuncts(schema: object, resolve: Resolve, level: int = 0) -> Iterator[Mapping[str, Any]]:
    """Schemas that a value must fit all."""
    if not isinstance(schema, dict) or level > MAX_LEVELS:
        return

    # In older drafts nothing beside a reference counts.
    pointer = schema.get("$ref")
    if isinstance(pointer, str):
        yield from conjuncts(resolve(pointer), resolve, level + 1)
        return

    yield schema
    for part in schema.get("allOf", ()):
        yield from conjuncts(part, resolve, level + 1)


def _have_other_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    values = listed_values(one)
    others = listed_values(other)
    return values is not None and others is not None and not values & others


def _have_other_properties(
    one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, level: int
) -> bool:
    """Whether a property that one of two objects must have tells them apart."""
    for part, against in ((one, other), (other, one)):
        is_closed = (
            against.get("additionalProperties") is False and "patternProperties" not in against
        )
        for name in part.get("required", ()):
            if is_closed and name not in against.get("properties", {}):
                return True

            if are_disjoint(_property(part, name), _property(against, name), resolve, level + 1):
                return True

    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type", TYPES)
    found = {given} if isinstance(given, str) else set(given)
    if "integer" in found:
        found = found - {"integer"} | {"number"}

    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if values is None else found & {KINDS.get(type(value), "null") for value in values}


def listed_values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that are listed, or None if any value may be."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return (
        None if values is None else {json.dumps(plain(value), sort_keys=True) for value in values}
    )


def plain(value: object) -> object:
    """A value in which equal numbers are written alike."""
    if isinstance(value, list):
        return [plain(one) for one in value]

    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}

    return int(value) if isinstance(value, float) and value.is_integer() else value


def _property(schema: Mapping[str, Any], name: object) -> object:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None
