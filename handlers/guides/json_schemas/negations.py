"""What a value must be like so that it does not fit a JSON schema, written as schemas."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from handlers.guides.json_schemas.disjoint import (
    KINDS,
    TYPES,
    Resolve,
    are_disjoint,
    conjuncts,
    listed_values,
    plain,
)
from handlers.guides.json_schemas.subschema import Schema

Schemas = list[Schema]

# So many steps may the whole of a client's schema take.
MAX_STEPS = 4_000
MAX_LEVELS = 8
# So many letters have the strings that a pattern leaves out.
MAX_LETTERS = 1_000
# So many numbers are left out by intervals.
MAX_NUMBERS = 16
# A oneOf of more schemas is not negated by pairs that both fit.
MAX_PAIRS = 6
CLOSED = {"type": "object", "additionalProperties": False}
ANY_LETTER = r"[\s\S]"


class Negations:
    """Makes negations for one schema, whose references `resolve` follows."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._num_steps = 0
        # By its keyword, what makes the negations of a rule: of the schema that has it, within the
        # context, at a level.
        self._rules: dict[str, Callable[[Schema, Schema, int], Iterable[Schema]]] = {
            "type": _of_type,
            "enum": _of_values,
            "const": _of_values,
            "minimum": _of_bounds,
            "maximum": _of_bounds,
            "exclusiveMinimum": _of_bounds,
            "exclusiveMaximum": _of_bounds,
            "minLength": _of_sizes,
            "maxLength": _of_sizes,
            "minItems": _of_sizes,
            "maxItems": _of_sizes,
            "minProperties": _of_min_properties,
            "required": _of_required,
            "dependentRequired": _of_dependent_required,
            "not": _of_not,
            "allOf": self._of_all,
            "anyOf": self._of_any,
            "oneOf": self._of_one,
            "if": self._of_condition,
            "$ref": self._of_reference,
            "properties": self._of_properties,
            "additionalProperties": self._of_more_properties,
            "prefixItems": self._of_items,
            "items": self._of_items,
            "contains": self._of_contains,
        }

    def of(self, schema: object, context: Schema, level: int = 0) -> Schemas:
        """Schemas of values that do not fit `schema`. They may leave out some of those values,
        perhaps all.

        `context` is a schema that the values fit anyway: what no such value fits is left out.
        Raises ValueError if it takes too many steps.
        """
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise ValueError("so many schemas that a value must not fit cannot be followed")

        if schema is False:
            return [{}]

        if not isinstance(schema, dict) or level > MAX_LEVELS:
            return []

        if "$ref" in schema:
            # In older drafts nothing beside a reference counts.
            keywords = ["$ref"]
        else:
            # The order of the schema, because the order of a set differs between processes.
            keywords = [keyword for keyword in schema if keyword in self._rules]

        negations: dict[str, Schema] = {}
        for keyword in keywords:
            for negation in self._rules[keyword](schema, context, level):
                negations[json.dumps(negation, sort_keys=True)] = negation

        possible = []
        for negation in negations.values():
            if not are_disjoint(negation, context, self._resolve):
                possible.append(negation)

        return sorted(possible, key=_size)

    def _of_all(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        for part in schema["allOf"]:
            yield from self.of(part, context, level + 1)

    def _of_any(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        yield from self._of_none(schema["anyOf"], context, level)

    def _of_one(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        parts = schema["oneOf"]
        yield from self._of_none(parts, context, level)
        if len(parts) <= MAX_PAIRS:
            for pair in combinations(parts, 2):
                yield {"allOf": list(pair)}

    def _of_none(self, parts: Sequence[object], context: Schema, level: int) -> Iterator[Schema]:
        """A value that fits none of several schemas."""
        negations = []
        for part in parts:
            if not self._are_apart(part, context):
                negations.append(self.of(part, context, level + 1))

        if not negations:
            yield {}
        elif all(negations):
            yield together([any_of(choices) for choices in negations])

    def _are_apart(self, schema: object, context: Schema) -> bool:
        """Whether no value fits both. Nothing is known of the empty context of a whole schema."""
        return bool(context) and are_disjoint(schema, context, self._resolve)

    def _of_condition(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        condition = schema["if"]
        breaks = self.of(schema.get("then", True), context, level + 1)
        if breaks:
            yield together([condition, any_of(breaks)])

        breaks = self.of(schema.get("else", True), context, level + 1)
        if not breaks:
            return

        opposites = self.of(condition, context, level + 1)
        if opposites:
            yield together([any_of(opposites), any_of(breaks)])

    def _of_reference(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        if isinstance(schema["$ref"], str):
            yield from self.of(self._resolve(schema["$ref"]), context, level + 1)

    def _of_properties(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        for name, inner in schema["properties"].items():
            yield from self._of_property(name, inner, context, level)

    def _of_more_properties(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        """Other properties that the context knows by name."""
        if "patternProperties" in schema:
            return

        inner = schema["additionalProperties"]
        for part in conjuncts(context, self._resolve):
            for name in part.get("properties", ()):
                if name not in schema.get("properties", {}):
                    yield from self._of_property(name, inner, context, level)

    def _of_property(
        self, name: str, inner: object, context: Schema, level: int
    ) -> Iterator[Schema]:
        inner_schemas = []
        for part in conjuncts(context, self._resolve):
            properties = part.get("properties", {})
            if name in properties:
                inner_schemas.append(properties[name])

        negations = self.of(inner, {"allOf": inner_schemas}, level + 1)
        if negations:
            yield {"type": "object", "required": [name], "properties": {name: any_of(negations)}}

    def _of_items(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        first = schema.get("prefixItems", [])
        more = schema.get("items", True)
        if isinstance(more, list):
            first = more
            more = schema.get("additionalItems", True)

        for place, inner in enumerate([*first, more]):
            negations = self.of(inner, {}, level + 1)
            if negations:
                items = [*[True] * place, any_of(negations)]
                yield {"type": "array", "minItems": place + 1, "prefixItems": items}

    def _of_contains(self, schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
        if schema.get("minContains") == 0:
            return

        negations = self.of(schema["contains"], {}, level + 1)
        if negations:
            yield {"type": "array", "items": any_of(negations)}
        else:
            yield {"type": "array", "maxItems": 0}


def any_of(schemas: Sequence[Any]) -> Any:
    """Return a schema for what fits one of `schemas`, of which there is one at least."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def together(schemas: Sequence[Any]) -> Schema:
    """Return a schema for what fits all of `schemas`."""
    return {"allOf": list(schemas)}


def _of_type(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    types = schema["type"]
    names = {types} if isinstance(types, str) else set(types)
    if "integer" in names:
        # No schema of numbers leaves out the integers.
        names.add("number")

    other_types = TYPES - names
    if other_types:
        yield {"type": sorted(other_types)}


def _of_values(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    for part in conjuncts(context, _of_nothing):
        possible = listed_values(part)
        if possible is not None:
            yield from _other_listed_values(values, possible)
            return

    kinds = {KINDS.get(type(value), "null") for value in values}
    other_kinds = TYPES - kinds
    if other_kinds:
        yield {"type": sorted(other_kinds)}

    if "boolean" in kinds:
        booleans = {value for value in values if isinstance(value, bool)}
        if len(booleans) == 1:
            yield {"enum": [not booleans.pop()]}

    if "string" in kinds:
        yield from _other_strings([value for value in values if isinstance(value, str)])

    if "number" in kinds:
        yield from _other_numbers([value for value in values if KINDS.get(type(value)) == "number"])

    if "array" in kinds:
        longest = max(len(value) for value in values if isinstance(value, list))
        yield {"type": "array", "minItems": 1 + longest}


def _other_listed_values(values: Iterable[object], possible: set[str]) -> Iterator[Schema]:
    """Those of the possible values, as JSON, that are none of some."""
    left_out = {json.dumps(plain(value), sort_keys=True) for value in values}
    other_values = [json.loads(text) for text in sorted(possible - left_out)]
    if other_values:
        yield {"enum": other_values}


def _other_strings(values: Iterable[str]) -> Iterator[Schema]:
    """The strings that are none of some, by a pattern."""
    if sum(map(len, values)) > MAX_LETTERS:
        yield {"type": "string", "minLength": 1 + max(map(len, values))}
    else:
        yield {"type": "string", "pattern": f"^{_none_of(sorted(set(values)))}$"}


def _none_of(endings: Sequence[str]) -> str:
    """A pattern of what is none of some texts."""
    by_letter: dict[str, list[str]] = {}
    for ending in endings:
        if ending:
            by_letter.setdefault(ending[0], []).append(ending[1:])

    choices = [] if "" in endings else [""]
    letters = "".join(map(_in_set, by_letter))
    choices.append(f"[^{letters}]{ANY_LETTER}*" if letters else f"{ANY_LETTER}+")
    for letter, inner_endings in by_letter.items():
        choices.append(f"[{_in_set(letter)}]{_none_of(inner_endings)}")

    return f"(?:{'|'.join(choices)})"


def _in_set(letter: str) -> str:
    if letter in "\\]^-[":
        return f"\\{letter}"

    return letter


def _other_numbers(values: Iterable[float]) -> Iterator[Schema]:
    numbers = sorted(set(values))
    if len(numbers) > MAX_NUMBERS:
        numbers = [numbers[0], numbers[-1]]
        between: list[tuple[float, float]] = []
    else:
        between = list(zip(numbers, numbers[1:], strict=False))

    yield {"type": "number", "exclusiveMinimum": numbers[-1]}
    yield {"type": "number", "exclusiveMaximum": numbers[0]}
    for least, most in between:
        yield {"type": "number", "exclusiveMinimum": least, "exclusiveMaximum": most}


def _of_bounds(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    """Of drafts 4 and newer: an exclusive bound may be a number, or true beside the bound."""
    sides = (("minimum", "exclusiveMinimum", "maximum"), ("maximum", "exclusiveMaximum", "minimum"))
    for inclusive, exclusive, beyond in sides:
        if inclusive in schema:
            is_exclusive = schema.get(exclusive) is True
            bound = beyond if is_exclusive else f"exclusive{beyond.capitalize()}"
            yield {"type": "number", bound: schema[inclusive]}

        if exclusive in schema and not isinstance(schema[exclusive], bool):
            yield {"type": "number", beyond: schema[exclusive]}


def _of_sizes(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    for kind, noun in (("string", "Length"), ("array", "Items")):
        least = schema.get(f"min{noun}")
        most = schema.get(f"max{noun}")
        if isinstance(least, int | float) and least >= 1:
            yield {"type": kind, f"max{noun}": int(least) - 1}

        if isinstance(most, int | float):
            yield {"type": kind, f"min{noun}": int(most) + 1}


def _of_min_properties(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    if isinstance(schema["minProperties"], int | float) and schema["minProperties"] >= 1:
        yield CLOSED


def _of_required(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    if isinstance(schema["required"], list):
        for name in schema["required"]:
            yield {"type": "object", "properties": {name: False}}


def _of_dependent_required(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    for name, needed in schema["dependentRequired"].items():
        for needed_name in needed:
            yield {"type": "object", "required": [name], "properties": {needed_name: False}}


def _of_not(schema: Schema, context: Schema, level: int) -> Iterator[Schema]:
    inner = schema["not"]
    if isinstance(inner, bool):
        inner = {} if inner else {"enum": []}

    yield inner


def _of_nothing(pointer: str) -> object:
    return None


def _size(schema: Mapping[str, Any]) -> int:
    return len(json.dumps(schema))
