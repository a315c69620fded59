"""Rules of arrays that look at several items at once, written as rules of each item."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, islice, permutations
from typing import Any

from handlers.guides.disjoint_schemas import (
    KINDS,
    Resolve,
    are_disjoint,
    conjuncts,
    listed_values,
    plain,
)

Schema = dict[str, Any]
Orders = Callable[[Sequence[Any], int], Iterable[tuple[Any, ...]]]

MAX_LISTED = 256  # arrays
MAX_CONTAINED = 16  # items that fit `contains`
MAX_BEFORE = 8  # items before the first of them


def with_unique_items(
    first: Sequence[Any], rest: object, least: int, most: int | None, resolve: Resolve
) -> Schema:
    """A rule of arrays of `least` to `most` items in which no two are equal; {} if no two can be.

    The items have the schemas `first`, the others `rest`. Raises ValueError if there is no such
    rule. It may leave out arrays: it lists them, in as many orders as there is room for, or they
    have at most one item.
    """
    if rest is False:
        most = len(first) if most is None else min(most, len(first))

    are_all_first = most is not None and most <= len(first)
    if are_all_first and all(
        are_disjoint(one, other, resolve) for one, other in combinations(first[:most], 2)
    ):
        return {}

    values = None if first else _all_values(rest, resolve)
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

    written = [json.dumps(plain(item), sort_keys=True) for item in value]
    return len(set(written)) == len(written)


def containing(wanted: object, others: Schema | None, least: int, most: int | None) -> list[Schema]:
    """Arrays in which `least` to `most` items fit the schema `wanted`; they may leave out others.

    `others` is a schema of items that do not fit, or None if none is known. Raises ValueError for
    large numbers.
    """
    if max(least, most or 0) > MAX_CONTAINED:
        raise ValueError(f"contains with more than {MAX_CONTAINED} items")

    if most is None:
        num_places = MAX_BEFORE if least == 1 else 1
        places = [[*[True] * place, *[wanted] * least] for place in range(num_places)]
        return [{"type": "array", "minItems": len(items), "prefixItems": items} for items in places]

    if least > most:
        return []

    array: Schema = {"type": "array", "minItems": least, "prefixItems": [wanted] * most}
    return [{**array, "items": False if others is None else others}]


def _all_values(schema: object, resolve: Resolve) -> list[Any] | None:
    """The values that fit a schema, as far as it lists them and says nothing else."""
    if not isinstance(schema, dict):
        return None

    parts = list(conjuncts(schema, resolve))
    values: set[str] | None = None
    for part in parts:
        if part.keys() & RULES_OF_VALUES:
            return None

        listed = listed_values(part)
        if listed is None and part.get("type") == "boolean":
            listed = {"false", "true"}

        if listed is not None:
            values = listed if values is None else values & listed

    if values is None:
        return None

    read = [json.loads(text) for text in sorted(values)]
    types = [part["type"] for part in parts if "type" in part]
    return [value for value in read if all(_has_type(value, given) for given in types)]


def _has_type(value: object, given: str | list[str]) -> bool:
    names = {given} if isinstance(given, str) else set(given)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return KINDS.get(type(value), "null") in names or (is_whole and "integer" in names)


def _arrays_of(values: Sequence[Any], least: int, most: int) -> list[list[Any]]:
    """Arrays of different values: in every order, or in the order of the values, or the shorter
    ones alone.
    """
    orders: tuple[Orders, ...] = (permutations, combinations)
    for choose in orders:
        found = _some(choose, values, least, most)
        if len(found) <= MAX_LISTED:
            return found

    longest = least
    while len(_some(combinations, values, least, longest + 1)) <= MAX_LISTED:
        longest += 1

    return _some(combinations, values, least, longest)[:MAX_LISTED]


def _some(choose: Orders, values: Sequence[Any], least: int, most: int) -> list[list[Any]]:
    """Up to one more than there is room for."""
    lengths = range(least, most + 1)
    found: Iterator[tuple[Any, ...]] = chain.from_iterable(
        choose(values, length) for length in lengths
    )
    return [list(items) for items in islice(found, MAX_LISTED + 1)]


RULES_OF_VALUES = frozenset(
    "anyOf oneOf not if pattern format minimum maximum exclusiveMinimum exclusiveMaximum "
    "multipleOf minLength "
    "maxLength properties patternProperties additionalProperties propertyNames required "
    "minProperties maxProperties "
    "items prefixItems contains uniqueItems minItems maxItems dependentRequired dependentSchemas "
    "dependencies "
    "unevaluatedItems unevaluatedProperties".split()
)
