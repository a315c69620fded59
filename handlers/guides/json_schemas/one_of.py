"""The branches of a `oneOf`, each without the values that fit another."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from handlers.guides.json_schemas.disjoint import Resolve, are_disjoint, conjuncts, listed_values
from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import NO_RULES
from handlers.guides.json_schemas.negations import Negations
from handlers.guides.json_schemas.objects import closed, has_all_names
from handlers.guides.json_schemas.strings import StringRules
from handlers.guides.json_schemas.subschema import ReadSchema, Schema, Subschema
from handlers.guides.json_schemas.value_types import types_of

# So many branches of a oneOf are compared with each other.
MAX_COMPARED = 128
# So many ways are written in which a branch of a oneOf keeps out of the others.
MAX_CHOICES = 8


@dataclass(frozen=True)
class Branch:
    schema: Any
    # The schema with the type that its keywords imply, where it is read narrowly. A value that
    # another branch must not fit is compared with this one as the client wrote it.
    typed_schema: Any
    # The values that it lists, as JSON.
    values: set[str] | None


class OneOfReader:
    def __init__(self, read: ReadSchema, resolve: Resolve, negations: Negations) -> None:
        self._read = read
        self._resolve = resolve
        self._negations = negations
        self._strings = StringRules()

    def branches_of(self, subschema: Subschema, *, is_alone: bool) -> list[Schema | bool]:
        """Return schemas of which no value fits two. `is_alone` is meant of each branch."""
        context = subschema.context
        branches = _branches(subschema.keywords["oneOf"], is_alone=is_alone)
        if len(branches) > MAX_COMPARED and any(branch.values is None for branch in branches):
            raise SchemaFault(f"oneOf of more than {MAX_COMPARED} schemas")

        rivals_of_branches = [self._rivals(branch, branches, context) for branch in branches]

        parts: list[Schema | bool] = []
        for number, (branch, rivals) in enumerate(zip(branches, rivals_of_branches, strict=True)):
            pointer = f"{subschema.pointer}/oneOf/{number}"
            source = Subschema(branch.typed_schema, pointer, is_alone)
            if rivals:
                parts.append(self._without_rivals(source, rivals, context))
            else:
                parts.append(self._read(source.keywords, pointer, is_alone=is_alone))

        if all(part is False for part in parts) and any(rivals_of_branches):
            raise SchemaFault("oneOf of schemas that one value might fit together")

        return parts

    def _rivals(self, branch: Branch, branches: list[Branch], context: Schema) -> list[Any]:
        """The schemas of those other branches that might fit the same value."""
        schema = branch.typed_schema
        if isinstance(schema, dict):
            schema = {"allOf": [context, schema]}

        rivals = []
        for rival in branches:
            if rival is branch or _list_other_values(branch, rival):
                continue

            if not self._share_none(schema, rival.schema):
                rivals.append(rival.schema)

        return rivals

    def _share_none(self, first: object, second: object) -> bool:
        """Whether no value fits both schemas. False where it is not known."""
        if are_disjoint(first, second, self._resolve):
            return True

        parts = [*conjuncts(first, self._resolve), *conjuncts(second, self._resolve)]
        are_strings = any(part.get("type") == "string" for part in parts)
        return are_strings and self._strings.share_none(parts)

    def _without_rivals(
        self, branch: Subschema, rivals: list[Any], context: Schema
    ) -> Schema | bool:
        """A branch without the values that fit other branches, False if nothing is known to be
        left. A branch whose values have only the names that it lists has fewer to leave out.
        """
        if branch.is_alone and has_all_names(branch.keywords):
            narrow = Subschema(closed(branch.keywords), branch.pointer, is_alone=True)
            followed = self._left_of(narrow, rivals, context)
            if followed is not None:
                return followed

        wide = Subschema(branch.keywords, branch.pointer, is_alone=False)
        return self._left_of(wide, rivals, context) or False

    def _left_of(self, branch: Subschema, rivals: list[Any], context: Schema) -> Schema | None:
        num_choices = max(1, int(MAX_CHOICES ** (1 / len(rivals))))
        branch_context = {"allOf": [context, branch.keywords]}
        negations = []
        for rival in rivals:
            negations.append(self._negations.of(rival, branch_context)[:num_choices])

        if not all(negations):
            return None

        parts = [self._read(branch.keywords, branch.pointer, is_alone=branch.is_alone)]
        for choices in negations:
            parts.append(self._any_of(choices, branch.pointer))

        return {"allOf": parts}

    def _any_of(self, schemas: list[Schema], pointer: str) -> Schema:
        return {"anyOf": [self._read(schema, pointer, is_alone=False) for schema in schemas]}


def _branches(schemas: list[Any], *, is_alone: bool) -> list[Branch]:
    branches = []
    for schema in _without_common_types(schemas):
        typed_schema = schema
        values = None
        if isinstance(schema, dict):
            typed_schema = {**types_of(schema, is_alone=is_alone), **schema}
            values = listed_values(schema)

        branches.append(Branch(schema, typed_schema, values))

    return branches


def _list_other_values(first: Branch, second: Branch) -> bool:
    """Whether both branches list their values, and none is in both lists."""
    if first.values is None or second.values is None:
        return False

    return first.values.isdisjoint(second.values)


def _without_common_types(schemas: list[Any]) -> list[Any]:
    """The schemas without the types that several of them allow with no further rule: what has one
    fits them all.
    """
    types_of_schemas = [_plain_types(schema) for schema in schemas]
    counts = Counter[str]()
    for types in types_of_schemas:
        counts.update(types)

    separate: list[Schema] = []
    for types in types_of_schemas:
        own_types = {name for name in types if counts[name] == 1}
        # Numbers that are no integers have no name.
        has_no_name = "number" in own_types and "integer" not in own_types
        if not own_types or has_no_name:
            return schemas

        separate.append({"type": sorted(own_types)})

    return separate


def _plain_types(schema: object) -> set[str]:
    """The types of a schema that has no other rule; a number is an integer or another number."""
    if not isinstance(schema, dict) or schema.keys() - NO_RULES != {"type"}:
        return set()

    names = schema["type"]
    if isinstance(names, str):
        names = [names]

    if not isinstance(names, list):
        return set()

    types = {name for name in names if isinstance(name, str)}
    if "number" in types:
        types.add("integer")

    return types
