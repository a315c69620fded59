"""Whether no value fits two JSON schemas at once, as far as types, listed values and required
properties show it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

Resolve = Callable[[str], object]
# An integer is a number.
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})
KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
MAX_LEVELS = 4


def are_disjoint(first: object, second: object, resolve: Resolve, level: int = 0) -> bool:
    """`resolve` gives the schema of a reference. False where it is not known."""
    if first is False or second is False:
        return True

    first_parts = list(conjuncts(first, resolve))
    second_parts = list(conjuncts(second, resolve))
    types = TYPES.intersection(*map(_types, first_parts + second_parts))
    if not types:
        return True

    is_object = types == {"object"} and level <= MAX_LEVELS
    for part, second_part in product(first_parts, second_parts):
        if _have_other_values(part, second_part):
            return True

        if is_object and _have_other_properties(part, second_part, resolve, level):
            return True

    return False


def required_of(schema: object, resolve: Resolve) -> set[str]:
    """The names that every value has; none where not every value is known to be an object."""
    parts = list(conjuncts(schema, resolve))
    types = TYPES.intersection(*map(_types, parts))
    if types != {"object"}:
        return set()

    return {name for part in parts for name in part.get("required", ())}


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


def _have_other_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    first_values = listed_values(first)
    second_values = listed_values(second)
    if first_values is None or second_values is None:
        return False

    return first_values.isdisjoint(second_values)


def _have_other_properties(
    first: Mapping[str, Any], second: Mapping[str, Any], resolve: Resolve, level: int
) -> bool:
    """Whether a property that one of two objects must have tells them apart."""
    for part, against in ((first, second), (second, first)):
        has_only_named = against.get("additionalProperties") is False
        is_closed = has_only_named and "patternProperties" not in against
        for name in part.get("required", ()):
            if is_closed and name not in against.get("properties", {}):
                return True

            if are_disjoint(_property(part, name), _property(against, name), resolve, level + 1):
                return True

    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("type", TYPES)
    types = {names} if isinstance(names, str) else set(names)
    if "integer" in types:
        types.remove("integer")
        types.add("number")

    values = _values(schema)
    if values is None:
        return types

    return types & {KINDS.get(type(value), "null") for value in values}


def listed_values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that are listed, or None if any value may be."""
    values = _values(schema)
    if values is None:
        return None

    return {json.dumps(plain(value), sort_keys=True) for value in values}


def _values(schema: Mapping[str, Any]) -> Any:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def plain(value: object) -> object:
    """A value in which equal numbers are written alike."""
    if isinstance(value, list):
        return [plain(entry) for entry in value]

    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}

    if isinstance(value, float) and value.is_integer():
        return int(value)

    return value


def _property(schema: Mapping[str, Any], name: object) -> object:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None
