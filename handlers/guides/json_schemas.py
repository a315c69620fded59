"""Writes a client's JSON schema so that llguidance follows all of it, or refuses it. Written
against llguidance 1.9.1.

Where no other schema says something of the same value, it is read narrowly: `properties` without
`type` mean an object, `items` an array, and an object has only the properties that have a name,
unless the schema says something of others. A `format` that llguidance does not know is dropped, as
the specification allows, and so is a word that is no keyword.

What llguidance cannot leave out (`not`, `if`, a `oneOf` whose schemas share values) is left out by
schemas of other values, from `negated_schemas.py`. Those are not all that there are: an answer is
always valid, but some valid values cannot be written. The same holds of `contains` and
`uniqueItems`, from `array_rules.py`.
"""

import json
import re
from collections import Counter
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from handlers.guides.array_rules import are_unique, containing, with_unique_items
from handlers.guides.disjoint_schemas import (
    TYPES as DISJOINT_TYPES,
    are_disjoint,
    conjuncts,
    listed_values,
)
from handlers.guides.lark import rust_regex
from handlers.guides.negated_schemas import Negations, any_of
from handlers.guides.string_rules import StringRules
from lmi.errors import shorten
from lmi.shared.json_references import with_pointers

Schema = dict[str, Any]

MAX_LEVELS = 100
# A larger integer is rounded.
MAX_INTEGER = 2**53
MAX_MULTIPLE = 10_000
MAX_PATTERN_PROPERTIES = 64
MAX_PATTERNS_TOGETHER = 4
MAX_OPTIONAL = 1_000
# So many branches of a oneOf are compared with each other.
MAX_COMPARED = 128
# So many ways are written in which a branch of a oneOf keeps out of the others.
MAX_CHOICES = 8
# So many names may propertyNames list.
MAX_NAMES = 1_000
TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NOT_FOLLOWED = ("$dynamicRef", "$recursiveRef", "disallow", "extends", "divisibleBy")
NAME_RULES = ("pattern", "minLength", "maxLength")
OLD_DRAFT = re.compile(r"draft-0[3-7]\b")
CONDITIONS = ("if", "then", "else")
NO_RULES = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "additionalItems",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "else",
        "example",
        "examples",
        "id",
        "maxContains",
        "minContains",
        "nullable",
        "readOnly",
        "then",
        "title",
        "unevaluatedItems",
        "unevaluatedProperties",
        "writeOnly",
    }
)
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
OBJECT = {"type": "object"}
# The schema of a guide that asks for JSON and gives none.
ANY_OBJECT = '{"type": "object"}'
COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "if", *DEPENDENT)
# The keywords by which an object may have more properties than a schema names.
ALLOWS_MORE_NAMES = frozenset(
    {
        *COMBINED,
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
    }
)
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
APPLIED = frozenset({*COMBINED, *CONDITIONS, "not"})
MAPPINGS = ("properties", "patternProperties", *DEPENDENT)
LISTS = ("enum", "prefixItems", "anyOf", "oneOf", "allOf")
# The types of keywords. One that is not here may have any.
JSON_TYPES = {
    "pattern": str,
    **dict.fromkeys(LISTS, list),
    **dict.fromkeys(MAPPINGS, dict),
}
# What a string of an answer never has.
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
OF_PATTERNS = re.compile(r"\\(?:x[01][0-9A-Fa-f]|x7[Ff]|u00[01][0-9A-Fa-f]|u007[Ff]|[xu]\{|c|0)")


def read_schema(text: str) -> Schema:
    """Raises ValueError for a schema that cannot be followed, with the rule and where it stands."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        if isinstance(schema, dict):
            schema = with_pointers(schema)

        return _SchemaReader(schema).read()
    except RecursionError:
        raise ValueError("so many levels cannot be followed") from None


class _Fault(ValueError):
    """What cannot be followed. Where it stands is known to the reader of its schema."""


class _SchemaReader:
    def __init__(self, root: object) -> None:
        self._root = root
        # The names in `$defs` of the schemas that are referred to.
        self._names: dict[tuple[str, bool], str] = {}
        self._pending: list[tuple[str, bool]] = []
        self._negations = Negations(self._resolve)
        self._strings = StringRules()

    def read(self) -> Schema:
        root = self._schema(self._root, "", is_alone=True)

        defs: Schema = {}
        while self._pending:
            pointer, is_alone = self._pending.pop()
            target = self._resolve(pointer)
            name = self._names[pointer, is_alone]
            defs[name] = self._schema(target, pointer, is_alone=is_alone)

        if root is True:
            root = {}
        elif root is False:
            root = {"enum": []}

        return {**root, "$defs": defs} if defs else root

    def _schema(self, schema: object, where: str, *, is_alone: bool) -> Schema | bool:
        """`is_alone`: no other schema says something of the same value, so this one may be read
        narrowly.
        """
        try:
            if isinstance(schema, bool):
                return schema

            if not isinstance(schema, dict):
                raise _Fault(f"{shorten(schema)} in place of a schema")

            if where.count("/") > 2 * MAX_LEVELS:
                raise ValueError("so many levels cannot be followed")

            if schema.get("not") is True or schema.get("not") == {}:
                return False

            _check_names(schema)
            out = _types(schema, is_alone=is_alone) | _values(schema) | _numbers(schema)
            if "pattern" in schema:
                out["pattern"] = _pattern(schema["pattern"])

            if schema.get("format") in FORMATS:
                out["format"] = schema["format"]

            self._objects(schema, where, out, is_alone=is_alone)
            together = self._arrays(schema, where, out)
            self._combine(schema, where, out, together, is_alone=is_alone)
            return out
        except _Fault as fault:
            place = ""
            if where.strip("#/"):
                place = f" in {where.removeprefix('#').strip('/')}"

            raise ValueError(f"{fault}{place} cannot be followed") from None

    def _inner(self, schema: object, where: str, *names: object) -> Schema | bool:
        return self._schema(schema, "/".join((where, *map(str, names))), is_alone=True)

    # Rules of objects.

    def _objects(self, schema: Schema, where: str, out: Schema, *, is_alone: bool) -> None:
        required = _names(schema.get("required", []), "required")
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        more = _schema_of_rest(schema, schema.get("additionalProperties"), "unevaluatedProperties")
        if "propertyNames" in schema:
            properties, patterns, more = self._with_names(schema, properties, patterns, more)

        for name in (*required, *properties):
            _check_value(name)

        if len(properties.keys() - set(required)) > MAX_OPTIONAL:
            raise _Fault(f"more than {MAX_OPTIONAL} properties that are not required")

        if len(patterns) > MAX_PATTERN_PROPERTIES:
            raise _Fault(f"patternProperties with more than {MAX_PATTERN_PROPERTIES} names")

        has_all_names = is_alone and _has_all_names(schema)
        if more is None and has_all_names:
            more = False
            properties = dict(properties)
            for name in required:
                properties.setdefault(name, True)

        least = out.get("minProperties", 0)
        if least <= len(required):
            out.pop("minProperties", None)
        elif least == 1 and properties:
            del out["minProperties"]
            out["anyOf"] = [{"required": [name]} for name in properties]
        elif least > 1 and more is not False:
            raise _Fault(f"minProperties {least} with properties that have no name of their own")

        if required:
            out["required"] = required

        if properties:
            out["properties"] = {
                name: self._inner(inner, where, "properties", name)
                for name, inner in properties.items()
            }

        if patterns:
            out["patternProperties"] = {
                _pattern(name): self._inner(inner, where, "patternProperties", name)
                for name, inner in patterns.items()
            }

        if more is not None:
            out["additionalProperties"] = self._inner(more, where, "additionalProperties")

    def _with_names(
        self, schema: Schema, properties: Schema, patterns: Schema, more: Any
    ) -> tuple[Schema, Schema, Any]:
        """`propertyNames` as other rules, where it lists the names, or is a pattern or sizes and
        nothing else is said of properties.
        """
        names = schema["propertyNames"]
        if names is True or names == {}:
            return properties, patterns, more

        if names is False:
            return dict.fromkeys(properties, False), {}, False

        schema_of_rest = True if more is None else more
        allowed_names = self._listed_names(names)
        if allowed_names is not None and not patterns:
            allowed: Schema = {}
            for name, inner in properties.items():
                allowed[name] = inner if name in allowed_names else False

            for name in sorted(allowed_names):
                allowed.setdefault(name, schema_of_rest)

            return allowed, {}, False

        is_pattern = isinstance(names, dict) and not names.keys() - NO_RULES - {"type", *NAME_RULES}
        if not is_pattern or patterns or "properties" in schema or "required" in schema:
            raise _Fault("propertyNames")

        return {}, {_pattern_of_names(names): schema_of_rest}, False

    def _listed_names(self, names: object) -> set[str] | None:
        """The names that a schema lists, None if it says something else of them."""
        if isinstance(names, dict) and not names.keys() - NO_RULES - {"anyOf", "oneOf"}:
            choices = names.get("anyOf") or names.get("oneOf") or []
            lists = [self._listed_names(choice) for choice in choices]
            if not lists or names.keys() >= {"anyOf", "oneOf"} or None in lists:
                return None

            counts = Counter[str]()
            for part_names in lists:
                counts.update(part_names or ())

            return {name for name, number in counts.items() if number == 1 or "anyOf" in names}

        parts = list(conjuncts(names, self._resolve))
        if any(part.keys() - NO_RULES - {"type", "enum", "const", "allOf"} for part in parts):
            return None

        values_of_parts = [values for values in map(listed_values, parts) if values is not None]
        if not values_of_parts:
            return None

        values = [json.loads(text) for text in set.intersection(*values_of_parts)]
        if len(values) > MAX_NAMES:
            raise _Fault(f"propertyNames with more than {MAX_NAMES} names")

        return {value for value in values if isinstance(value, str)}

    # Rules of arrays.

    def _arrays(self, schema: Schema, where: str, out: Schema) -> list[Schema | bool]:
        """The rules that a value must fit besides."""
        together: list[Schema | bool] = []
        first = schema.get("prefixItems")
        more = schema.get("items")
        # In older drafts `items` may list the schemas of the first items.
        if isinstance(more, list):
            first = more
            more = schema.get("additionalItems")

        more = _schema_of_rest(schema, more, "unevaluatedItems")

        if schema.get("uniqueItems") not in (None, False) and out.get("maxItems", 2) > 1:
            unique = self._unique(schema, first or [], more, out)
            if "enum" in unique:
                together.append({"anyOf": [{"type": sorted(DISJOINT_TYPES - {"array"})}, unique]})
            else:
                out |= unique

        if "contains" in schema:
            together += self._contains(schema, where)

        if first is not None:
            out["prefixItems"] = [
                self._inner(inner, where, "prefixItems", number)
                for number, inner in enumerate(first)
            ]

        if more is not None:
            out["items"] = self._inner(more, where, "items")

        return together

    def _unique(self, schema: Schema, first: list[Any], more: object, out: Schema) -> Schema:
        """A rule of arrays whose items are not equal."""
        if listed_values(schema) is not None:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return {"enum": [value for value in values if are_unique(value)]}

        least = out.get("minItems", 0)
        most = out.get("maxItems")
        try:
            return with_unique_items(first, more, least, most, self._resolve)
        except ValueError as error:
            raise _Fault(str(error)) from None

    def _contains(self, schema: Schema, where: str) -> list[Schema | bool]:
        """Rules of arrays with the items that `contains` wants."""
        least, most = (1, None) if self._is_of_old_draft() else _contained(schema)
        if least == 0 and most is None:
            return []

        contained = schema["contains"]
        negations = self._negations.of(contained, {})
        other_schema = any_of(negations) if negations else None
        try:
            arrays = containing(contained, other_schema, least, most)
        except ValueError as error:
            raise _Fault(str(error)) from None

        no_array = {"type": sorted(DISJOINT_TYPES - {"array"})}
        choices = [self._schema(array, f"{where}/contains", is_alone=False) for array in arrays]
        return [{"anyOf": [no_array, *choices]}]

    def _is_of_old_draft(self) -> bool:
        if not isinstance(self._root, dict):
            return False

        return OLD_DRAFT.search(str(self._root.get("$schema", ""))) is not None

    # Rules that combine schemas.

    def _combine(
        self,
        schema: Schema,
        where: str,
        out: Schema,
        together: list[Schema | bool],
        *,
        is_alone: bool,
    ) -> None:
        """Add the rules that combine schemas to `out`, and those in `together`."""
        typed = {"type"} if schema.get("type") == "object" else set()
        is_outer_alone = is_alone
        is_alone = is_alone and len(schema.keys() - NO_RULES - typed) == 1
        for name in ("allOf", "anyOf", "oneOf"):
            if name not in schema:
                continue

            branches = schema[name]
            if not branches:
                raise _Fault(f"{name} of a wrong type")

            if name == "oneOf":
                together.append({"anyOf": self._one_of(schema, where, is_alone=is_alone)})
                continue

            is_single = name != "allOf" or len(branches) == 1
            parts = [
                self._schema(branch, f"{where}/{name}/{number}", is_alone=is_alone and is_single)
                for number, branch in enumerate(branches)
            ]
            if name == "allOf":
                together += parts
            else:
                together.append({"anyOf": parts})

        together += self._dependent(schema, where)

        if "if" in schema and schema.keys() & {"then", "else"}:
            together.append(self._condition(schema, where))

        if "not" in schema:
            together.append(self._negated(schema, where, is_alone=is_outer_alone))

        if together:
            out["allOf"] = together

        if _num_patterns(out) > MAX_PATTERNS_TOGETHER:
            raise _Fault(f"allOf with more than {MAX_PATTERNS_TOGETHER} patterns")

        if "$ref" in schema:
            out["$ref"] = f"#/$defs/{self._name(schema['$ref'], is_alone=is_alone)}"

    def _dependent(self, schema: Schema, where: str) -> list[Schema | bool]:
        """The rules of objects that have one property and then need something else."""
        rules: list[Schema | bool] = []
        for keyword in DEPENDENT:
            for name, needed in schema.get(keyword, {}).items():
                needs: Schema | bool
                if isinstance(needed, list):
                    needs = {"required": _names(needed, keyword)}
                else:
                    needs = self._schema(needed, f"{where}/{keyword}/{name}", is_alone=False)

                _check_value(name)
                has_it = {"allOf": [{"required": [name]}, needs]}
                rules.append({"anyOf": [{"properties": {name: False}}, has_it]})

        return rules

    def _negated(self, schema: Schema, where: str, *, is_alone: bool) -> Schema:
        """Schemas of values that do not fit `not`, of which a value must fit one."""
        context = {name: rule for name, rule in schema.items() if name not in APPLIED}
        if is_alone and _has_all_names(schema):
            context = _closed(context)

        negations = self._negations.of(schema["not"], context)
        if not negations:
            raise _Fault("not")

        return self._any(negations, f"{where}/not")

    def _condition(self, schema: Schema, where: str) -> Schema:
        """The schemas of `then` and `else`, each with what the value must be like for it."""
        context = {name: rule for name, rule in schema.items() if name not in APPLIED}
        condition = schema["if"]
        choices: list[Schema] = []
        if not are_disjoint(condition, context, self._resolve):
            choices.append({"allOf": [condition, schema.get("then", True)]})

        for negation in self._negations.of(condition, context):
            choices.append({"allOf": [negation, schema.get("else", True)]})

        return self._any(choices, f"{where}/if")

    def _any(self, schemas: list[Schema], where: str) -> Schema:
        return {"anyOf": [self._schema(schema, where, is_alone=False) for schema in schemas]}

    def _one_of(self, schema: Schema, where: str, *, is_alone: bool) -> list[Schema | bool]:
        """The branches of a oneOf, each without what fits another."""
        branches = _without_common_types(schema["oneOf"])
        typed_branches: list[Any] = []
        for branch in branches:
            if isinstance(branch, dict):
                branch = {**_types(branch, is_alone=is_alone), **branch}

            typed_branches.append(branch)

        context = {name: rule for name, rule in schema.items() if name not in APPLIED}
        overlapping = self._overlapping(typed_branches, branches, context)

        parts: list[Schema | bool] = []
        for number, branch in enumerate(typed_branches):
            place = f"{where}/oneOf/{number}"
            rivals = [branches[rival_number] for rival_number in overlapping[number]]
            if rivals:
                part = self._without_rivals(branch, rivals, context, place, is_alone=is_alone)
            else:
                part = self._schema(branch, place, is_alone=is_alone)

            parts.append(part)

        if all(part is False for part in parts) and any(overlapping):
            raise _Fault("oneOf of schemas that one value might fit together")

        return parts

    def _overlapping(
        self, typed_branches: list[Any], branches: list[Any], context: Schema
    ) -> list[list[int]]:
        """For each branch, the numbers of those other branches that might fit the same value.

        `typed_branches` are read perhaps narrowly. A value that another branch must not fit is
        compared with it as it is in `branches`.
        """
        overlapping: list[list[int]] = [[] for _ in branches]
        values_of_branches: list[set[str] | None] = []
        for branch in branches:
            values_of_branches.append(listed_values(branch) if isinstance(branch, dict) else None)

        if len(branches) > MAX_COMPARED and None in values_of_branches:
            raise _Fault(f"oneOf of more than {MAX_COMPARED} schemas")

        for number, branch in enumerate(typed_branches):
            within = {"allOf": [context, branch]} if isinstance(branch, dict) else branch
            values = values_of_branches[number]
            for rival_number, rival in enumerate(branches):
                if rival_number == number:
                    continue

                rival_values = values_of_branches[rival_number]
                if values is not None and rival_values is not None:
                    if values.isdisjoint(rival_values):
                        continue

                if not self._share_none(within, rival):
                    overlapping[number].append(rival_number)

        return overlapping

    def _share_none(self, first: object, second: object) -> bool:
        """Whether no value fits both schemas. False where it is not known."""
        if are_disjoint(first, second, self._resolve):
            return True

        parts = [*conjuncts(first, self._resolve), *conjuncts(second, self._resolve)]
        are_strings = any(part.get("type") == "string" for part in parts)
        return are_strings and self._strings.share_none(parts)

    def _without_rivals(
        self, branch: Any, rivals: list[Any], context: Schema, where: str, *, is_alone: bool
    ) -> Schema | bool:
        """A branch of a oneOf without the values that fit other branches, False if nothing is known
        to be left.
        """
        num_choices = max(1, int(MAX_CHOICES ** (1 / len(rivals))))
        readings = [(branch, False)]
        if is_alone and _has_all_names(branch):
            readings.insert(0, (_closed(branch), True))

        for reading, is_read_alone in readings:
            reading_context = {"allOf": [context, reading]}
            negations = []
            for rival in rivals:
                negations.append(self._negations.of(rival, reading_context)[:num_choices])

            if not all(negations):
                continue

            parts: list[Schema | bool] = [self._schema(reading, where, is_alone=is_read_alone)]
            for choices in negations:
                parts.append(self._any(choices, where))

            return {"allOf": parts}

        return False

    def _name(self, pointer: object, *, is_alone: bool) -> str:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _Fault(f"$ref {shorten(pointer)}, which the schema does not resolve,")

        key = pointer, is_alone
        if key not in self._names:
            self._resolve(pointer)
            self._names[key] = str(len(self._names))
            self._pending.append(key)

        return self._names[key]

    def _resolve(self, pointer: str) -> object:
        """The schema that a pointer such as `#/$defs/a` stands for. Raises ValueError if there is
        none.
        """
        target: Any = self._root
        try:
            for part in pointer.split("/")[1:]:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                target = target[int(part) if isinstance(target, list) else part]
        except (KeyError, IndexError, TypeError):
            target = None

        if not isinstance(target, dict | bool):
            raise ValueError(
                f"$ref {shorten(pointer)}, which points at no schema, cannot be followed"
            )

        return target


def _check_names(schema: Schema) -> None:
    for name in schema:
        if name in NOT_FOLLOWED:
            raise _Fault(name)

        if not isinstance(schema[name], JSON_TYPES.get(name, object)):
            raise _Fault(f"{name} of a wrong type")


def _has_all_names(schema: object) -> bool:
    """Whether an object has only the properties that a schema names, if no other schema says
    something of it.
    """
    if not isinstance(schema, dict) or "properties" not in schema:
        return False

    return not schema.keys() & ALLOWS_MORE_NAMES


def _closed(schema: Schema) -> Schema:
    """A schema of objects that have only the properties that it names."""
    names = schema.get("required", [])
    required: Schema = {}
    if isinstance(names, list):
        required = dict.fromkeys(names, True)

    return {
        **schema,
        "properties": {**required, **schema.get("properties", {})},
        "additionalProperties": False,
    }


def _types(schema: Schema, *, is_alone: bool) -> Schema:
    if "type" not in schema:
        return _implied_types(schema) if is_alone else {}

    types = schema["type"]
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            raise _Fault(f"type {shorten(name)}")

    return {"type": types}


def _implied_types(schema: Schema) -> Schema:
    if schema.keys() & {*COMBINED, "enum", "const"}:
        return {}

    if schema.keys() & ABOUT_OBJECTS:
        return OBJECT

    if schema.keys() & ABOUT_ARRAYS:
        return {"type": "array"}

    return {}


def _values(schema: Schema) -> Schema:
    for value in [*schema.get("enum", ()), schema.get("const")]:
        _check_value(value)

    return {name: schema[name] for name in ("enum", "const") if name in schema}


def _check_value(value: object) -> None:
    """Check what an answer must be able to write, with all that is in it."""
    if isinstance(value, str) and CONTROL.search(value):
        raise _Fault(f"the control character in {shorten(value)}")

    # The condition holds of NaN too.
    if isinstance(value, int | float) and not abs(value) <= MAX_INTEGER:
        raise _Fault(f"the number {shorten(value)}, larger than {MAX_INTEGER},")

    if isinstance(value, list):
        for entry in value:
            _check_value(entry)

    if isinstance(value, dict):
        for name, entry in value.items():
            _check_value(name)
            _check_value(entry)


def _numbers(schema: Schema) -> Schema:
    out: Schema = {}
    for name in (*BOUNDS, *SIZES, "multipleOf"):
        if name not in schema:
            continue

        value = schema[name]
        # In draft 4 it says how the bound beside it is meant.
        if isinstance(value, bool) and name.startswith("exclusive"):
            continue

        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Fault(f"{name} of a wrong type")

        _check_value(value)
        if name in SIZES and (value < 0 or value != int(value)):
            raise _Fault(f"{name} {shorten(value)}")

        out[name] = int(value) if name in SIZES else value

    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and name in out:
            out[exclusive] = out.pop(name)

    step = out.get("multipleOf")
    if step is not None:
        is_small = step > 0 and Fraction(repr(step)).numerator <= MAX_MULTIPLE
        if not is_small:
            raise _Fault(f"multipleOf {step}, beyond {MAX_MULTIPLE},")

    return out


def _pattern(pattern: str) -> str:
    if CONTROL.search(pattern) or OF_PATTERNS.search(pattern):
        raise _Fault(f"the control character in {shorten(pattern)}")

    try:
        return rust_regex(pattern, is_in_json=True)
    except ValueError as error:
        raise _Fault(f"{shorten(pattern)}: {error}, so it") from None


def _names(value: object, keyword: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _Fault(f"{keyword} of a wrong type")

    return list(dict.fromkeys(value))


def _pattern_of_names(names: Schema) -> str:
    """A pattern of names from a pattern or from their length."""
    if "pattern" in names:
        if not isinstance(names["pattern"], str) or names.keys() & {"minLength", "maxLength"}:
            raise _Fault("propertyNames")

        return names["pattern"]

    sizes = _numbers({name: names[name] for name in ("minLength", "maxLength") if name in names})
    return f"^[\\s\\S]{{{sizes.get('minLength', 0)},{sizes.get('maxLength', '')}}}$"


def _contained(schema: Schema) -> tuple[int, int | None]:
    """How many items fit `contains`: at least and at most."""
    sizes: list[int | None] = []
    for name, default in (("minContains", 1), ("maxContains", None)):
        size = schema.get(name, default)
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        if size is not None and not (is_number and size >= 0 and size == int(size)):
            raise _Fault(f"{name} of a wrong type")

        sizes.append(None if size is None else int(size))

    return sizes[0] or 0, sizes[1]


def _schema_of_rest(schema: Schema, explicit: object, keyword: str) -> object:
    """The schema of what has no other: the explicit one, or that of `keyword` if nothing is
    evaluated elsewhere.
    """
    if explicit is not None or schema.get(keyword) in (None, True, {}):
        return explicit

    if schema.keys() & set(COMBINED):
        raise _Fault(keyword)

    return schema[keyword]


def _without_common_types(branches: list[Any]) -> list[Any]:
    """A oneOf without the types that several branches allow with no further rule: what has one fits
    them all.
    """
    types_of_branches = [_plain_types(branch) for branch in branches]
    counts = Counter[str]()
    for types in types_of_branches:
        counts.update(types)

    separate: list[Schema] = []
    for types in types_of_branches:
        own_types = {name for name in types if counts[name] == 1}
        # Numbers that are no integers have no name.
        has_no_name = "number" in own_types and "integer" not in own_types
        if not own_types or has_no_name:
            return branches

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


def _num_patterns(schema: Schema) -> int:
    number = int("pattern" in schema)
    for part in schema.get("allOf", ()):
        if isinstance(part, dict):
            number += _num_patterns(part)

    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
