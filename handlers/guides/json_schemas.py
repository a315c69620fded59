"""Writes a client's JSON schema so that llguidance follows all of it, or refuses it. Written against llguidance 1.9.1.

Where no other schema says something of the same value, it is read narrowly: `properties` without `type` mean an object,
`items` an array, and an object has only the properties that have a name, unless the schema says something of others. A
`format` that llguidance does not know is dropped, as the specification allows.
"""

import difflib
import json
import re
from collections import Counter
from fractions import Fraction
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from handlers.guides.disjoint_schemas import are_disjoint, required_of
from handlers.guides.lark import rust_regex
from lmi.errors import shorten
from lmi.shared.json_references import with_pointers

Schema = dict[str, Any]

MAX_LEVELS = 100
MAX_INTEGER = 2**53  # a larger one is rounded
MAX_MULTIPLE = 10_000
MAX_PATTERN_PROPERTIES = 64
MAX_PATTERNS_TOGETHER = 4
MAX_OPTIONAL = 1_000
MAX_COMPARED = 64  # branches of a oneOf
LIKENESS = 0.88  # of a misspelt keyword
TYPES = frozenset("null boolean object array number integer string".split())
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NOT_FOLLOWED = "not contains $dynamicRef $recursiveRef disallow extends divisibleBy".split()
RULES = frozenset(
    "type enum const $ref anyOf oneOf allOf pattern format multipleOf uniqueItems properties patternProperties "
    "additionalProperties propertyNames required dependentRequired dependentSchemas items prefixItems".split()
).union(BOUNDS, SIZES, NOT_FOLLOWED)
NO_RULES = frozenset(
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $vocabulary $comment $defs definitions title description "
    "default example examples deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema if then "
    "else minContains maxContains dependencies nullable additionalItems unevaluatedItems unevaluatedProperties".split()
)
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
OBJECT = {"type": "object"}
ANY_OBJECT = '{"type": "object"}'  # what JSON means
COMBINED = ("$ref", "anyOf", "oneOf", "allOf", *DEPENDENT)
MAPPINGS = ("properties", "patternProperties", *DEPENDENT)
LISTS = ("enum", "prefixItems", "anyOf", "oneOf", "allOf")
JSON_TYPES = {"pattern": str, **dict.fromkeys(LISTS, list), **dict.fromkeys(MAPPINGS, dict)}  # else: of any
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")  # what a string of an answer never has
OF_PATTERNS = re.compile(r"\\(?:x[01][0-9A-Fa-f]|x7[Ff]|u00[01][0-9A-Fa-f]|u007[Ff]|[xu]\{|c|0)")


def read_schema(text: str) -> Schema:
    """Raises ValueError for a schema that cannot be followed, with the rule and where it stands."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        return _SchemaReader(with_pointers(schema) if isinstance(schema, dict) else schema).read()
    except RecursionError:
        raise ValueError("so many levels cannot be followed") from None


class _Fault(ValueError):
    """What cannot be followed. Where it stands is known to the reader of its schema."""


class _SchemaReader:
    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[tuple[str, bool], str] = {}  # in `$defs`, of the schemas that are referred to
        self._pending: list[tuple[str, bool]] = []

    def read(self) -> Schema:
        read = self._schema(self._root, "", is_alone=True)
        defs: Schema = {}
        while self._pending:
            pointer, is_alone = self._pending.pop()
            defs[self._names[pointer, is_alone]] = self._schema(self._resolve(pointer), pointer, is_alone=is_alone)
        schema = read if isinstance(read, dict) else {} if read else {"enum": []}
        return {**schema, "$defs": defs} if defs else schema

    def _schema(self, schema: object, where: str, *, is_alone: bool) -> Schema | bool:
        """`is_alone`: no other schema says something of the same value, so this one may be read narrowly."""
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
            self._arrays(schema, where, out)
            self._combine(schema, where, out, is_alone=is_alone)
            return out
        except _Fault as fault:
            place = f" in {where.removeprefix('#').strip('/')}" if where.strip("#/") else ""
            raise ValueError(f"{fault}{place} cannot be followed") from None

    def _inner(self, schema: object, where: str, *names: object) -> Schema | bool:
        return self._schema(schema, "/".join((where, *map(str, names))), is_alone=True)

    # Rules of objects.

    def _objects(self, schema: Schema, where: str, out: Schema, *, is_alone: bool) -> None:
        required = _names(schema.get("required", []), "required")
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        more = _rest(schema, schema.get("additionalProperties"), "unevaluatedProperties")
        if "propertyNames" in schema:
            patterns, more = _named(schema, patterns, more)
        for name in (*required, *properties):
            _check_value(name)
        if len(properties.keys() - set(required)) > MAX_OPTIONAL:
            raise _Fault(f"more than {MAX_OPTIONAL} properties that are not required")
        if len(patterns) > MAX_PATTERN_PROPERTIES:
            raise _Fault(f"patternProperties with more than {MAX_PATTERN_PROPERTIES} names")
        is_all = "properties" in schema and is_alone and not schema.keys() & {*COMBINED, "patternProperties"}
        if more is None and is_all:
            more = False
            properties = {**properties, **{name: True for name in required if name not in properties}}
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
            out["properties"] = {name: self._inner(one, where, "properties", name) for name, one in properties.items()}
        if patterns:
            out["patternProperties"] = {
                _pattern(name): self._inner(one, where, "patternProperties", name) for name, one in patterns.items()
            }
        if more is not None:
            out["additionalProperties"] = self._inner(more, where, "additionalProperties")

    # Rules of arrays.

    def _arrays(self, schema: Schema, where: str, out: Schema) -> None:
        first, rest = schema.get("prefixItems"), schema.get("items")
        if isinstance(rest, list):  # of older drafts
            first, rest = rest, schema.get("additionalItems")
        rest = _rest(schema, rest, "unevaluatedItems")
        if schema.get("uniqueItems") not in (None, False) and out.get("maxItems", 2) > 1:
            raise _Fault("uniqueItems")
        if first is not None:
            out["prefixItems"] = [self._inner(one, where, "prefixItems", number) for number, one in enumerate(first)]
        if rest is not None:
            out["items"] = self._inner(rest, where, "items")

    # Rules that combine schemas.

    def _combine(self, schema: Schema, where: str, out: Schema, *, is_alone: bool) -> None:
        together: list[Schema | bool] = []
        typed = {"type"} if schema.get("type") == "object" else set()
        is_alone = is_alone and len(schema.keys() - NO_RULES - typed) == 1
        for name in ("allOf", "anyOf", "oneOf"):
            if name not in schema:
                continue
            if not (given := schema[name]):
                raise _Fault(f"{name} of a wrong type")
            given = _without_common_types(given) if name == "oneOf" else given
            is_single = name != "allOf" or len(given) == 1
            parts = [
                self._schema(one, f"{where}/{name}/{number}", is_alone=is_alone and is_single)
                for number, one in enumerate(given)
            ]
            if name == "oneOf":
                absent = self._absent(given, out, is_alone=is_alone)
                parts = [_without(names, part) for names, part in zip(absent, parts, strict=True)]
            together += parts if name == "allOf" else [{"anyOf": parts}]
        for keyword in DEPENDENT:
            for name, needed in schema.get(keyword, {}).items():
                needs: Schema | bool
                if isinstance(needed, list):
                    needs = {"required": _names(needed, keyword)}
                else:
                    needs = self._schema(needed, f"{where}/{keyword}/{name}", is_alone=False)
                _check_value(name)
                has_it = {"allOf": [{"required": [name]}, needs]}
                together.append({"anyOf": [{"properties": {name: False}}, has_it]})
        if together:
            out["allOf"] = together
        if _num_patterns(out) > MAX_PATTERNS_TOGETHER:
            raise _Fault(f"allOf with more than {MAX_PATTERNS_TOGETHER} patterns")
        if "$ref" in schema:
            out["$ref"] = f"#/$defs/{self._name(schema['$ref'], is_alone=is_alone)}"

    def _absent(self, branches: list[Any], out: Schema, *, is_alone: bool) -> list[set[str]]:
        """The names that a value of each branch must not have, so that it fits no other, which requires them.

        `out` is what is known of the value. Raises ValueError if a value might fit two branches nevertheless.
        """
        types = [_types(one, is_alone=is_alone) for one in branches if isinstance(one, dict)]
        if types == [OBJECT] * len(branches):
            out = OBJECT
        known = {"type": out["type"]} if "type" in out else {}
        typed = [{"allOf": [known, one]} if isinstance(one, dict) else one for one in branches]
        absent: list[set[str]] = [set() for _ in branches]
        for (place, one), (other_place, other) in combinations(enumerate(typed), 2):
            if len(branches) <= MAX_COMPARED and are_disjoint(one, other, self._resolve):
                continue
            names, others = required_of(one, self._resolve), required_of(other, self._resolve)
            if len(branches) > MAX_COMPARED or names <= others or others <= names:
                raise _Fault("oneOf of schemas that one value might fit together")
            absent[place].add(min(others - names))
            absent[other_place].add(min(names - others))
        return absent

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
        """The schema that a pointer such as `#/$defs/a` stands for. Raises ValueError if there is none."""
        found: Any = self._root
        try:
            for part in pointer.split("/")[1:]:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                found = found[int(part) if isinstance(found, list) else part]
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, dict | bool):
            raise ValueError(f"$ref {shorten(pointer)}, which points at no schema, cannot be followed")
        return found


def _without(names: set[str], schema: Schema | bool) -> Schema | bool:
    """A schema of objects that have no property of these names."""
    return {"allOf": [schema, {"properties": dict.fromkeys(sorted(names), False)}]} if names else schema


def _check_names(schema: Schema) -> None:
    for name in schema:
        if name in NOT_FOLLOWED or (name == "nullable" and schema[name]):
            raise _Fault(name)
        is_known = name in RULES or name in NO_RULES or name.startswith("_")  # which nobody writes by mistake
        if not is_known and (like := difflib.get_close_matches(name, RULES, 1, LIKENESS)):
            raise _Fault(f"{name} (perhaps {like[0]})")
        if not isinstance(schema[name], JSON_TYPES.get(name, object)):
            raise _Fault(f"{name} of a wrong type")
    if "if" in schema and schema.keys() & {"then", "else"}:
        raise _Fault("if")


def _types(schema: Schema, *, is_alone: bool) -> Schema:
    if "type" not in schema:
        if is_alone and not schema.keys() & {*COMBINED, "enum", "const"}:
            if schema.keys() & {"properties", "patternProperties", "additionalProperties", "propertyNames"}:
                return OBJECT
            if schema.keys() & {"items", "prefixItems"}:
                return {"type": "array"}
        return {}
    given = schema["type"]
    for name in given if isinstance(given, list) else [given]:
        if not isinstance(name, str) or name not in TYPES:
            raise _Fault(f"type {shorten(name)}")
    return {"type": given}


def _values(schema: Schema) -> Schema:
    for value in [*schema.get("enum", ()), schema.get("const")]:
        _check_value(value)
    return {name: schema[name] for name in ("enum", "const") if name in schema}


def _check_value(value: object) -> None:
    """Check what an answer must be able to write, with all that is in it."""
    if isinstance(value, str) and CONTROL.search(value):
        raise _Fault(f"the control character in {shorten(value)}")
    if isinstance(value, int | float) and not abs(value) <= MAX_INTEGER:  # or NaN
        raise _Fault(f"the number {shorten(value)}, larger than {MAX_INTEGER},")
    if isinstance(value, list | dict):
        for one in value:
            _check_value(one)
            if isinstance(value, dict):
                _check_value(value[one])


def _numbers(schema: Schema) -> Schema:
    out: Schema = {}
    for name in (*BOUNDS, *SIZES, "multipleOf"):
        if name not in schema:
            continue
        value = schema[name]
        if isinstance(value, bool) and name.startswith("exclusive"):  # of draft 4, where it says how a bound is meant
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
    if step is not None and not (step > 0 and Fraction(repr(step)).numerator <= MAX_MULTIPLE):
        raise _Fault(f"multipleOf {step}, beyond {MAX_MULTIPLE},")
    return out


def _pattern(pattern: str) -> str:
    if CONTROL.search(pattern) or OF_PATTERNS.search(pattern):
        raise _Fault(f"the control character in {shorten(pattern)}")
    try:
        return rust_regex(pattern, is_in_json=True)
    except ValueError as error:
        raise _Fault(f"{shorten(pattern)}: {error}, so it") from None


def _names(given: object, keyword: str) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise _Fault(f"{keyword} of a wrong type")
    return list(dict.fromkeys(given))


def _named(schema: Schema, patterns: Schema, more: object) -> tuple[Schema, object]:
    """`propertyNames` as patternProperties, where it is a pattern and all that an object says of names."""
    names = schema["propertyNames"]
    if names is True or names == {}:
        return patterns, more
    pattern = names.get("pattern") if isinstance(names, dict) and names.keys() <= {"pattern", "type"} else None
    if not isinstance(pattern, str) or patterns or "properties" in schema or "required" in schema:
        raise _Fault("propertyNames")
    return {pattern: True if more is None else more}, False


def _rest(schema: Schema, given: object, keyword: str) -> object:
    """The schema of what has no other: the given one, or that of `keyword` if nothing is evaluated elsewhere."""
    if given is not None or schema.get(keyword) in (None, True, {}):
        return given
    if schema.keys() & set(COMBINED):
        raise _Fault(keyword)
    return schema[keyword]


def _without_common_types(branches: list[Any]) -> list[Any]:
    """A oneOf without the types that several branches allow with no further rule: what has one fits them all."""
    plain = [_plain_types(one) for one in branches]
    counts = Counter(name for types in plain for name in types)
    rest = [{name for name in types if counts[name] == 1} for types in plain]
    if not all(rest) or any("number" in types and "integer" not in types for types in rest):  # a rest without a name
        return branches
    return [{"type": sorted(types)} for types in rest]


def _plain_types(schema: object) -> set[str]:
    """The types of a schema that has no other rule; a number is an integer or another number."""
    given = schema.get("type") if isinstance(schema, dict) and schema.keys() - NO_RULES == {"type"} else None
    if not isinstance(given, str | list):
        return set()
    types = {name for name in ([given] if isinstance(given, str) else given) if isinstance(name, str)}
    return types | {"integer"} if "number" in types else types


def _num_patterns(schema: Schema) -> int:
    return ("pattern" in schema) + sum(_num_patterns(one) for one in schema.get("allOf", ()) if isinstance(one, dict))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
