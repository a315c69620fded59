"""`propertyNames`, written as other rules of properties."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from handlers.guides.json_schemas.bounds import bounds_of
from handlers.guides.json_schemas.disjoint import Resolve, conjuncts, listed_values
from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import NO_RULES
from handlers.guides.json_schemas.subschema import Schema

# So many names may propertyNames list.
MAX_NAMES = 1_000
NAME_RULES = ("pattern", "minLength", "maxLength")


@dataclass(frozen=True)
class ObjectProperties:
    """The schemas of an object's properties."""

    named: Schema
    by_pattern: Schema
    # None where nothing is said of other properties.
    others: Any


def with_property_names(
    properties: ObjectProperties, keywords: Schema, resolve: Resolve
) -> ObjectProperties:
    """The properties of an object with `propertyNames`, where it lists the names, or is a pattern
    or sizes and nothing else is said of properties.
    """
    names = keywords["propertyNames"]
    if names is True or names == {}:
        return properties

    if names is False:
        return _only_named(dict.fromkeys(properties.named, False))

    schema_of_others = True if properties.others is None else properties.others
    allowed_names = _listed_names(names, resolve)
    if allowed_names is not None and not properties.by_pattern:
        allowed: Schema = {}
        for name, schema in properties.named.items():
            allowed[name] = schema if name in allowed_names else False

        for name in sorted(allowed_names):
            allowed.setdefault(name, schema_of_others)

        return _only_named(allowed)

    is_pattern = isinstance(names, dict) and not names.keys() - NO_RULES - {"type", *NAME_RULES}
    says_more = bool(properties.by_pattern) or "properties" in keywords or "required" in keywords
    if not is_pattern or says_more:
        raise SchemaFault("propertyNames")

    return ObjectProperties({}, {_pattern_of_names(names): schema_of_others}, others=False)


def _only_named(named: Schema) -> ObjectProperties:
    return ObjectProperties(named, by_pattern={}, others=False)


def _listed_names(names: object, resolve: Resolve) -> set[str] | None:
    """The names that a schema lists, None if it says something else of them."""
    if isinstance(names, dict) and not names.keys() - NO_RULES - {"anyOf", "oneOf"}:
        return _names_of_branches(names, resolve)

    parts = list(conjuncts(names, resolve))
    if any(part.keys() - NO_RULES - {"type", "enum", "const", "allOf"} for part in parts):
        return None

    values_of_parts = [values for values in map(listed_values, parts) if values is not None]
    if not values_of_parts:
        return None

    values = [json.loads(text) for text in set.intersection(*values_of_parts)]
    if len(values) > MAX_NAMES:
        raise SchemaFault(f"propertyNames with more than {MAX_NAMES} names")

    return {value for value in values if isinstance(value, str)}


def _names_of_branches(names: Schema, resolve: Resolve) -> set[str] | None:
    """The names that the schemas of `anyOf` list, or of `oneOf`, where a name fits only one."""
    branches = names.get("anyOf") or names.get("oneOf") or []
    lists = [_listed_names(branch, resolve) for branch in branches]
    if not lists or names.keys() >= {"anyOf", "oneOf"} or None in lists:
        return None

    counts = Counter[str]()
    for names_of_branch in lists:
        counts.update(names_of_branch or ())

    return {name for name, number in counts.items() if number == 1 or "anyOf" in names}


def _pattern_of_names(names: Schema) -> str:
    """A pattern of names from a pattern or from their length."""
    if "pattern" in names:
        if not isinstance(names["pattern"], str) or names.keys() & {"minLength", "maxLength"}:
            raise SchemaFault("propertyNames")

        return names["pattern"]

    sizes = bounds_of({name: names[name] for name in ("minLength", "maxLength") if name in names})
    return f"^[\\s\\S]{{{sizes.get('minLength', 0)},{sizes.get('maxLength', '')}}}$"
