"""`uniqueItems`, written as a list of arrays or as rules of each item."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, islice, permutations
from typing import Any

from handlers.guides.json_schemas.disjoint import (
    KINDS,
    Resolve,
    are_disjoint,
    conjuncts,
    listed_values,
    plain,
)
from handlers.guides.json_schemas.subschema import Schema

Orders = Callable[[Sequence[Any], int], Iterable[tuple[Any, ...]]]

# So many arrays are listed at most.
MAX_LISTED = 256
# The keywords that say something of a value and do not list it.
RULES_OF_VALUES = frozenset(
    {
        "additionalProperties",
        "anyOf",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)


def with_unique_items(
    first: Sequence[Any], more: object, least: int, most: int | None, resolve: Resolve
) -> Schema:
    """A rule of arrays of `least` to `most` items in which no two are equal; {} if no two can be.

    The items have the schemas `first`, later ones `more`. Raises ValueError if there is no such
    rule. It may leave out arrays: it lists them, in as many orders as there is room for, or they
    have at most one item.
    """
    if more is False:
        most = len(first) if most is None else min(most, len(first))

    are_all_first = most is not None and most <= len(first)
    if are_all_first:
        pairs = combinations(first[:most], 2)
        if all(are_disjoint(schema, other_schema, resolve) for schema, other_schema in pairs):
            return {}

    values = None if first else _all_values(more, resolve)
    if values is not None:
        longest = len(values) if most is None else min(most, len(values))
        return {"enum": _arrays_of(values, least, longest)}

    if least > 1:
        raise ValueError("uniqueItems with several items that have no list of values")

    return {"maxItems": 1}


def are_unique(value: object) -> bool:
    """Whether no two items are equal, if the value is an array."""
    if not isinstance(value, list):
        return True

    texts = [json.dumps(plain(entry), sort_keys=True) for entry in value]
    return len(set(texts)) == len(texts)


def _all_values(schema: object, resolve: Resolve) -> list[Any] | None:
    """The values that fit a schema, as far as it lists them and says nothing else."""
    if not isinstance(schema, dict):
        return None

    parts = list(conjuncts(schema, resolve))
    values: set[str] | None = None
    for part in parts:
        if part.keys() & RULES_OF_VALUES:
            return None

        part_values = listed_values(part)
        if part_values is None and part.get("type") == "boolean":
            part_values = {"false", "true"}

        if part_values is not None:
            values = part_values if values is None else values & part_values

    if values is None:
        return None

    types = [part["type"] for part in parts if "type" in part]
    fitting = []
    for text in sorted(values):
        value = json.loads(text)
        if all(_has_type(value, type) for type in types):
            fitting.append(value)

    return fitting


def _has_type(value: object, type_names: str | list[str]) -> bool:
    names = {type_names} if isinstance(type_names, str) else set(type_names)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return KINDS.get(type(value), "null") in names or (is_whole and "integer" in names)


def _arrays_of(values: Sequence[Any], least: int, most: int) -> list[list[Any]]:
    """Arrays of different values: in every order, or in the order of the values, or the shorter
    ones alone.
    """
    orders: tuple[Orders, ...] = (permutations, combinations)
    for choose in orders:
        arrays = _some(choose, values, least, most)
        if len(arrays) <= MAX_LISTED:
            return arrays

    longest = least
    while len(_some(combinations, values, least, longest + 1)) <= MAX_LISTED:
        longest += 1

    return _some(combinations, values, least, longest)[:MAX_LISTED]


def _some(choose: Orders, values: Sequence[Any], least: int, most: int) -> list[list[Any]]:
    """Up to one more than there is room for."""
    arrays: list[list[Any]] = []
    for length in range(least, most + 1):
        num_missing = MAX_LISTED + 1 - len(arrays)
        arrays += map(list, islice(choose(values, length), num_missing))

    return arrays
