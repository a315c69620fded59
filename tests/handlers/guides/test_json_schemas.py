"""JSON schemas: what is followed is followed whole, and the rest is refused by its name.

`json_schema_test_suite.json` holds the required cases of JSON-Schema-Test-Suite (drafts 2020-12 and
7), each with its valid and its invalid values. Copyright (c) 2012 Julian Berman, MIT license:
https://github.com/json-schema-org/JSON-Schema-Test-Suite/blob/main/LICENSE
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from handlers.guides.json_schemas.reader import read_schema
from lmi.executor import GuideType
from tests.handlers.guides.walks import accepts, matcher, matcher_of_schema, walk

SUITE = Path(__file__).parent / "json_schema_test_suite.json"
NUM_FOLLOWED = {"draft2020-12": 275, "draft7": 215}  # at least
MAX_ORDERS = 24


def orders(value: Any) -> Iterator[Any]:
    """A value with the names of its objects in every order, up to some."""
    if isinstance(value, dict):
        inner = itertools.product(
            *([(name, ordered) for ordered in orders(part)] for name, part in value.items())
        )
        shuffled = (dict(order) for pairs in inner for order in itertools.permutations(pairs))
        yield from itertools.islice(shuffled, MAX_ORDERS)
    elif isinstance(value, list):
        yield from (
            list(ordered)
            for ordered in itertools.islice(itertools.product(*map(orders, value)), MAX_ORDERS)
        )
    else:
        yield value


@pytest.mark.parametrize("draft", NUM_FOLLOWED)
def test_no_invalid_value_of_the_test_suite_can_be_an_answer(draft: str) -> None:
    num_followed = num_taken = num_valid = 0
    for of_draft, schema, valid, invalid in json.loads(SUITE.read_text()):
        if of_draft != draft:
            continue

        try:
            compact, loose = (
                matcher_of_schema(schema, is_compact=is_compact) for is_compact in (True, False)
            )
        except ValueError:
            continue

        num_followed += 1
        num_valid += len(valid)
        for value in valid:
            num_taken += any(
                accepts(compact, json.dumps(is_compact, separators=(",", ":")))
                for is_compact in orders(value)
            )

        for value in invalid:
            for is_compact in orders(value):
                assert not accepts(
                    compact, json.dumps(is_compact, separators=(",", ":"), ensure_ascii=False)
                ), (schema, is_compact)
                assert not accepts(loose, json.dumps(is_compact, ensure_ascii=False)), (
                    schema,
                    is_compact,
                )

    assert num_followed >= NUM_FOLLOWED[draft] and num_taken > 0.85 * num_valid


def of_kubernetes() -> list[dict[str, Any]]:
    """Some of its definitions, each with those that it needs."""
    folders = (files("kubernetes_validate") / "kubernetes-json-schema").iterdir()
    path = (
        max(
            (candidate for candidate in folders if candidate.name.endswith("local")),
            key=lambda one: one.name,
        )
        / "_definitions.json"
    )
    document = json.loads(path.read_text())
    defs = document.get("$defs") or document["definitions"]
    text = re.sub(r'"\$ref": "[^"]*/', '"$ref": "#/$defs/', json.dumps(defs))
    defs = json.loads(text)

    def needed(name: str, found: set[str]) -> set[str]:
        if name not in found:
            found.add(name)
            for needed_name in re.findall(r'"#/\$defs/([^"]+)"', json.dumps(defs[name])):
                needed(needed_name, found)

        return found

    names = random.Random(1).sample(sorted(defs), 80)
    return [
        {
            "$ref": f"#/$defs/{name}",
            "$defs": {candidate: defs[candidate] for candidate in needed(name, set())},
        }
        for name in names
    ]


def test_answers_of_real_schemas_are_valid() -> None:
    choice = random.Random(2)
    schemas = of_kubernetes()
    answers = [(schema, walk(matcher_of_schema(schema), choice)) for schema in schemas]
    whole = [(schema, answer) for schema, answer in answers if answer is not None]
    assert len(whole) > 0.95 * len(schemas)
    for schema, answer in whole:
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))


STRINGS = [
    "^a+$",
    "b",
    '^"x\\\\',
    '^[^"]*$',
    "a|b",
    r"[\d\-_.]+",
    "^x\ty$",
    r"^[^\\]+$",
    "^.{2,4}$",
    r"^\W+$",
    r"^\S*$",
]
VALUES = [1, 2.5, "a", 'q"\\/\u00e9', None, True, [1, "x"], {"k": 1}, -3, 0, "", 1e-7, "line\nend"]
NAMES = ["a", "b", "c", "x y", 'q"', "\u00e9"]


def random_schema(choice: random.Random, level: int) -> dict[str, Any]:
    """A schema of the rules that are followed, and of some that are not, in any combination."""

    def some(share: float, rules: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in rules.items() if choice.random() < share}

    def inner(num: int) -> list[dict[str, Any]]:
        return [random_schema(choice, level - 1) for _ in range(num)]

    def size(most: int) -> int:
        return choice.randint(0, most)

    kind = choice.choice(
        ["string", "number", "integer", "values"]
        if level <= 0
        else ["object"] * 3 + ["array", "any"]
    )
    if kind == "values":
        return choice.choice(
            [{"enum": choice.sample(VALUES, 3)}, {"const": choice.choice(VALUES)}, {}]
        )

    if kind == "string":
        rules = {
            "minLength": size(3),
            "maxLength": 2 + size(4),
            "pattern": choice.choice(STRINGS),
            "format": "date",
        }
        return {"type": "string", **some(0.2, rules)}

    if kind in ("number", "integer"):
        steps = {"multipleOf": choice.choice([2, 5, 0.5])}
        rules = {
            "minimum": choice.choice([-5, 1e-7, 2.5]),
            "exclusiveMaximum": choice.choice([10, 3.5, 1000]),
        }
        return {"type": kind, **some(0.3, rules), **some(0.1, steps)}

    if kind == "object":
        names = choice.sample(NAMES, size(4))
        rules = {
            "additionalProperties": choice.choice([False, True, *inner(1)]),
            "patternProperties": {choice.choice(["^a", "^p_", "x$"]): inner(1)[0]},
            "minProperties": size(2),
            "maxProperties": size(4),
            "dependentRequired": {"a": ["b"]},
            "propertyNames": {"pattern": "^[a-z]+$"},
        }
        properties = {
            "properties": dict(zip(names, inner(len(names)), strict=True)),
            "type": "object",
        }
        return {
            **some(0.9, properties),
            **some(0.5, {"required": names[: size(4)]}),
            **some(0.1, rules),
        }

    if kind == "array":
        rules = {
            "prefixItems": inner(2),
            "minItems": size(3),
            "maxItems": 1 + size(3),
            "uniqueItems": True,
        }
        return {"type": "array", "items": inner(1)[0], **some(0.2, rules)}

    combined = {choice.choice(["anyOf", "allOf", "oneOf"]): inner(1 + size(2))}
    return {**combined, **(inner(1)[0] if choice.random() < 0.3 else {})}


def test_answers_of_random_schemas_are_valid() -> None:
    num_followed = 0
    for seed in range(250):
        choice = random.Random(seed)
        schema = random_schema(choice, 3)
        try:
            follower = matcher_of_schema(schema)
        except ValueError:
            continue

        num_followed += 1
        for answer in (walk(follower, choice), walk(follower, choice)):
            if answer is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer))

    assert num_followed > 100


OPEN: dict[str, Any] = {"additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": '^"\\\\\n$'}, ['"\\"\\\\\\n"'], ['"""', '"\\"\\\\"']),
        ({"type": "string", "pattern": '^[^"]$'}, ['"a"', '"\\\\"'], ['"\\""']),
        ({"type": "string", "pattern": r"^[^\\]$"}, ['"\\""'], ['"\\\\"']),
        ({"type": "string", "pattern": "^a\tb$"}, ['"a\\tb"'], ['"a\tb"']),
        ({"type": "string", "pattern": r"^\W$"}, ['"-"'], ['"a"', '"\u00e9"']),
        ({"type": "number", "minimum": 1e-7, "maximum": 1}, ["0.5", "0.0000001"], ["0.00000001", "", "2"]),  # noqa: E501
        ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
        ({"type": "integer", "anyOf": [{"minimum": 5}, {"type": "string"}]}, ["5"], ["4", '"a"']),
        ({"$defs": {"s": {"minLength": 2}}, "$ref": "#/$defs/s", "type": "string"}, ['"ab"'], ['"a"', "1"]),  # noqa: E501
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ['{"b":1}'], ["{}", '{"c":1}']),
        ({"properties": {"ab": {"minLength": 0}}, "patternProperties": {"^a": {"maxLength": 1}}}, [], ['{"ab":"x1"}']),  # noqa: E501
        ({"properties": {"a": {"type": "integer"}}, **OPEN}, ['{"b":1}'], ['{"\\u0061":"x"}', '{"a":1,"a":"x"}']),  # noqa: E501
        ({"properties": {"a": {}}, "required": ["b"]}, ['{"b":1}'], ["{}", "1", '{"b":1,"c":1}']),
        ({"properties": {}}, ["{}"], ['{"a":1}', "1"]),
        ({"items": [{"type": "integer"}], "additionalItems": False}, ["[1]"], ["[1,2]", '["a"]']),
        ({"prefixItems": [{"type": "integer"}], "additionalItems": False, **{"type": "array"}}, ['[1,"a"]'], ['["a"]']),  # noqa: E501
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"const": 1}]}, ["[1]"], ["[2]"]),  # noqa: E501
        ({"dependencies": {"a": ["b"]}, "type": "object"}, ['{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),  # noqa: E501
        ({"dependentSchemas": {"a": {"required": ["b"]}}, "type": "object"}, ["{}"], ['{"a":1}']),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["null"]),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}, ['"a"', "1"], ["null"]),  # noqa: E501
        ({"oneOf": [{"required": [one]} for one in "abc"], "type": "object"}, ['{"c":1}'], ["{}", '{"a":1,"b":1}']),  # noqa: E501
        ({"properties": {"a": {"not": {}}, "b": {}}}, ['{"b":1}'], ['{"a":1}']),
        ({"type": "integer", "_minimum": 5}, ["4"], []),
        ({"type": "string", "format": "colour"}, ['"a"'], ["1"]),
        ({"const": 1, "x-guidance": {"lenient": True, "item_separator": ";"}}, ["1"], ["2"]),
        ({"type": "array", "x-guidance": {"item_separator": ";"}}, ["[1,2]"], ["[1;2]"]),
    ],
)  # fmt: skip
def test_a_rule_is_followed(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    follower = matcher_of_schema(schema)
    assert [text for text in right if not accepts(follower, text)] == []
    assert [text for text in wrong if accepts(follower, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True, "minItems": 2}, ("uniqueItems with several items "
                                                                "that have no list")),
        ({"contains": {}, "minContains": 17}, "contains with more than 16 items cannot be followed"),  # noqa: E501
        ({"properties": {"a": {"items": {"not": {"multipleOf": 2}}}}}, ("not in properties/a/items "
                                                                       "cannot be followed")),
        ({"disallow": "string"}, "disallow cannot be followed"),
        ({"type": "integer", "divisibleBy": 2}, "divisibleBy cannot be followed"),
        ({"const": 2**53 + 1}, ("the number 9007199254740993, beyond ±9007199254740992, cannot be "
                               "followed")),
        ({"enum": [{"a": [2**60]}]}, "the number 1152921504606846976"),
        ({"const": 10**400}, "the number 1000"),
        ({"type": "integer", "maximum": -(2**54)}, "-18014398509481984, beyond ±9007199254740992"),
        ({"const": "hello\0there"}, r"the character U\+0000 in 'hello\\x00there' cannot be followed"),  # noqa: E501
        ({"const": "\ud800"}, r"the character U\+D800 in "),
        ({"properties": {"\x01": {}}}, r"the character U\+0001 in "),
        ({"propertyNames": {"pattern": ["a"]}}, "propertyNames cannot be followed"),
        ({"type": "string", "pattern": "^\x01$"}, r"the character U\+0001 in "),
        ({"type": "string", "pattern": r"^\x01$"}, r"the escape \\x01 of a control character in "),
        ({"$ref": "https://example.com/schema"}, "which the schema does not resolve"),
        ({"$ref": "#/$defs/a"}, "which points at no schema"),
        ({"type": "integer", "multipleOf": 12345}, ("multipleOf 12345, beyond 10000, cannot be "
                                                   "followed")),
        ({"patternProperties": {f"^{number}": {} for number in range(65)}}, ("patternProperties "
                                                                            "with more than 64")),
        ({"allOf": [{"pattern": f"a.*{number}"} for number in range(5)]}, ("allOf with more than 4 "
                                                                          "patterns")),
        ({"properties": {str(number): {} for number in range(1001)}}, "more than 1000 properties"),
        ({"type": "object", "minProperties": 2}, ("minProperties 2 with properties that have no "
                                                 "name of their own")),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ("oneOf of schemas that one value "
                                                               "might fit together")),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_its_name(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_schema(json.dumps(schema))


KIND = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
OTHER = {
    "type": "object",
    "properties": {"kind": {"enum": ["b", "c"]}, "size": {"type": "integer"}},
}
CLOSED = {"type": "object", "properties": {"size": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "branches",
    [
        [KIND, OTHER],
        [KIND, {"allOf": [OTHER]}],
        [{"$ref": "#/$defs/k"}, {"$ref": "#/$defs/o"}],
        [KIND, CLOSED],
        [{"const": True}, {"const": 1}],
        [{"type": "null"}, {"type": "number"}, KIND],
    ],
)
def test_a_one_of_whose_schemas_share_no_value_is_followed(branches: list[dict[str, Any]]) -> None:
    schema = {"oneOf": branches, "$defs": {"k": KIND, "o": OTHER}}
    choice = random.Random(3)
    answers = {walk(matcher_of_schema(schema), choice) for _ in range(20)} - {None}
    for answer in answers:
        jsonschema.Draft202012Validator(schema).validate(json.loads(str(answer)))


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "oneOf of types": (
        {"oneOf": [{"type": "number"}, {"enum": [1, "a"]}]},
        ['"a"', "2"],
        ["1", "1.0", "null"],
    ),
    "oneOf with a schema without a type": (
        {"oneOf": [{"properties": {"a": {}}}, {"type": "array"}]},
        ['{"a":1}'],
        ["[]"],
    ),
    "oneOf of values": ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, ["2"], ["1"]),
    "oneOf of names": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]},
        ['{"a":1}'],
        ['{"a":1,"b":1}', '{"b":1}', "{}"],
    ),
    "oneOf of closed objects": (
        {"oneOf": [{"properties": {name: {}}, "additionalProperties": False} for name in "ab"]},
        ['{"a":1}', '{"b":1}'],
        ["{}"],
    ),
    "oneOf of arrays": (
        {"oneOf": [{"type": "array", "items": {"type": kind}} for kind in ("string", "number")]},
        ['["a"]', "[1,2]"],
        ["[]", '[1,"a"]'],
    ),
    "oneOf of patterns": (
        {
            "oneOf": [
                {"type": "string", "pattern": "^[a-f]+$"},
                {"type": "string", "maxLength": 0},
                {"type": "null"},
            ]
        },
        ['"ab"', '""', "null"],
        ['"x"'],
    ),
    "oneOf beside what is required": (
        {
            "type": "object",
            "required": ["kind"],
            "properties": {"kind": {}, "size": {}},
            "oneOf": [
                {"properties": {"kind": {"const": kind}, "size": {"type": "integer"}}}
                for kind in "ab"
            ],
        },
        ['{"kind":"a","size":1}', '{"kind":"b"}'],
        ['{"size":1}', '{"kind":"c"}'],
    ),
    "oneOf within oneOf": (
        {"oneOf": [{"oneOf": [{"const": 1}, {"enum": [1, 2]}]}, {"enum": [2, 3]}]},
        ["3"],
        ["1", "2"],
    ),
    "if of a value": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["box", "ball"]}, "side": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "box"}}},
            "then": {"required": ["side"]},
            "else": {"properties": {"side": False}},
        },
        ['{"kind":"box","side":1}', '{"kind":"ball"}'],
        ['{"kind":"box"}', '{"kind":"ball","side":1}', "{}"],
    ),
    "if of a bound": (
        {"type": "integer", "if": {"maximum": 5}, "then": {"minimum": 4}, "else": {"minimum": 9}},
        ["4", "5", "9"],
        ["3", "6", "8"],
    ),
    "if that leaves no choice": ({"if": {}, "then": {"type": "string"}}, ['"a"'], ["1"]),
    "not of a type": (
        {"not": {"type": ["object", "array"]}},
        ['"a"', "1", "null", "true"],
        ["{}", "[]"],
    ),
    "not of texts": (
        {"type": "string", "not": {"enum": ["ab", "a", "q]\\"]}},
        ['""', '"b"', '"abc"', '"q"', '"\\n"'],
        ['"ab"', '"a"', '"q]\\\\"'],
    ),
    "not of numbers": ({"type": "integer", "not": {"enum": [1, 3]}}, ["0", "2", "4"], ["1", "3"]),
    "not of names": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        ['{"a":1}', '{"b":1}', "{}"],
        ['{"a":1,"b":1}'],
    ),
    "not of a reference": (
        {
            "not": {"$ref": "#/$defs/s"},
            "type": ["string", "null"],
            "$defs": {"s": {"minLength": 2, "type": "string"}},
        },
        ['"a"', "null"],
        ['"ab"'],
    ),
    "not of not": ({"not": {"not": {"const": 1}}}, ["1"], ["2"]),
    "contains": (
        {"type": "array", "contains": {"const": 1}},
        ["[1]", "[2,1]", "[1,1]"],
        ["[]", "[2]"],
    ),
    "contains by numbers": (
        {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 1, "maxContains": 2},
        ["[1]", "[1,1]", "[1,1,2]"],
        ["[]", "[2]", "[1,1,1]"],
    ),
    "contains at most none": (
        {"contains": {"type": "null"}, "minContains": 0, "maxContains": 0},
        ["[]", "[1]"],
        ["[null]"],
    ),
    "contains that cannot be": (
        {"contains": {}, "minContains": 2, "maxContains": 1, "type": ["array", "null"]},
        ["null"],
        ["[1,2]"],
    ),
    "uniqueItems of values": (
        {"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2, "type": "array"},
        ['["a","b"]', '["c","a"]', '["b","c","a"]'],
        ['["a"]', '["a","a"]', '["a","b","a"]'],
    ),
    "uniqueItems of many values": (
        {"items": {"enum": list(range(40))}, "uniqueItems": True, "type": "array"},
        ["[]", "[39]"],
        ["[1,1]"],
    ),
    "uniqueItems of booleans": (
        {"items": {"type": "boolean"}, "uniqueItems": True},
        ["[true,false]"],
        ["[true,true]"],
    ),
    "uniqueItems of other schemas": (
        {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "null"}],
            "items": False,
            "uniqueItems": True,
        },
        ['["a",null]'],
        ['["a","a"]'],
    ),
    "uniqueItems of anything": ({"type": "array", "uniqueItems": True}, ["[]", "[1]"], ["[1,1]"]),
    "uniqueItems of given arrays": (
        {"enum": [[1, 1.0], [1, 2]], "uniqueItems": True},
        ["[1,2]"],
        ["[1,1.0]"],
    ),
    "propertyNames of values": (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ['{"a":1}', '{"a":1,"b":2}'],
        ['{"c":1}', '{"a":"x"}'],
    ),
    "propertyNames beside properties": (
        {
            "propertyNames": {"oneOf": [{"enum": ["a", "b"]}, {"const": "b"}]},
            "properties": {"a": {}, "b": {}},
        },
        ['{"a":1}', "{}"],
        ['{"b":1}'],
    ),
    "propertyNames of a length": (
        {"propertyNames": {"maxLength": 2}},
        ['{"ab":1}', "{}"],
        ['{"abc":1}'],
    ),
    "no propertyNames": ({"propertyNames": False, "properties": {"a": {}}}, ["{}"], ['{"a":1}']),
    "words that are no keywords": (
        {
            "type": "string",
            "minlength": 2,
            "nullable": True,
            "additonalProperties": False,
            "minium": 5,
        },
        ['"a"'],
        ["null"],
    ),
    "a bundled schema": (
        {
            "$id": "https://example.com/root",
            "properties": {"a": {"$ref": "leaf"}, "b": {"$ref": "#text"}},
            "$defs": {
                "x": {"$id": "leaf", "type": "null"},
                "y": {"$anchor": "text", "type": "string"},
            },
        },
        ['{"a":null,"b":"x"}'],
        ['{"a":1}', '{"b":null}'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_llguidance_cannot_leave_out_is_left_out(name: str) -> None:
    schema, right, wrong = CASES[name]
    follower = matcher_of_schema(schema)
    assert [text for text in right if not accepts(follower, text)] == []
    assert [text for text in wrong if accepts(follower, text)] == []

    validator = jsonschema.Draft202012Validator(schema)
    assert [text for text in right if not validator.is_valid(json.loads(text))] == []
    for seed in range(10):
        answer = walk(follower, random.Random(seed))
        assert answer is None or validator.is_valid(json.loads(answer)), answer


KEYWORDS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": ["string", "null"]},
    {"type": "object", "required": ["a"]},
    {"type": "object", "required": ["b"], "properties": {"a": {"type": "string"}}},
    {"properties": {"a": {"enum": ["x", "y"]}, "b": {}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "minItems": 1, "maxItems": 2},
    {"enum": ["x", 1, None, [1]]},
    {"const": "x"},
    {"minimum": 2, "exclusiveMaximum": 9},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "pattern": "^[xy]+$"},
    {"type": "array", "contains": {"const": 1}},
    {"$ref": "#/$defs/r"},
]


def random_rule(choice: random.Random, level: int) -> dict[str, Any]:
    """A schema of the rules that leave out what fits other schemas, one in another."""
    if level == 0 or choice.random() < 0.2:
        return choice.choice(KEYWORDS)

    parts = [random_rule(choice, level - 1) for _ in range(3)]
    beside = choice.choice([{}, {}, choice.choice(KEYWORDS)])
    rules: list[dict[str, Any]] = [
        {"oneOf": parts},
        {"not": parts[0]},
        {"if": parts[0], "then": parts[1], "else": parts[2]},
        {"if": parts[0], "then": parts[1]},
        {"type": "array", "contains": parts[0], "maxContains": 2},
        {"type": "array", "items": parts[0], "uniqueItems": True},
        {"allOf": parts[:2]},
        {"anyOf": parts},
    ]
    return {**beside, **choice.choice(rules)}


def test_answers_of_rules_that_leave_out_others_are_valid() -> None:
    num_answers = 0
    for seed in range(300):
        choice = random.Random(seed)
        schema = {**random_rule(choice, 3), "$defs": {"r": random_rule(choice, 1)}}
        if '"$ref"' in json.dumps(schema["$defs"]):
            continue

        try:
            follower = matcher_of_schema(schema)
        except ValueError:
            continue

        for answer in (walk(follower, choice), walk(follower, choice)):
            if answer is not None:
                num_answers += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer))

    assert num_answers > 100


def nested(keyword: str, level: int) -> dict[str, Any]:
    """A schema in which a keyword holds several others of the same kind, down to a level."""
    if level == 0:
        return {"required": ["a"]}

    inner = nested(keyword, level - 1)
    names = {f"n{level}": inner}
    if keyword == "if":
        return {"if": {"properties": names}, "then": inner, "else": {"properties": names}}

    return {
        keyword: [{"properties": names}, inner, {"required": [f"n{level}"], "properties": names}]
    }


@pytest.mark.parametrize("keyword", ["oneOf", "if"])
def test_rules_that_hold_many_others_are_bounded(keyword: str) -> None:
    started_s = time.thread_time()
    with contextlib.suppress(ValueError):
        read_schema(json.dumps(nested(keyword, 6)))

    assert time.thread_time() - started_s < 20


def test_json_is_compact_and_an_option_gives_a_bounded_number_of_spaces() -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    compact, loose = (
        matcher_of_schema(schema, is_compact=is_compact) for is_compact in (True, False)
    )
    spaced = '{ "a"\n: [1, 2]\t}'

    assert (
        accepts(compact, '{"a":[1,2]}')
        and not accepts(compact, '{"a": [1,2]}')
        and not accepts(compact, spaced)
    )
    assert (
        accepts(loose, spaced)
        and accepts(loose, '{"a":[1,2]}')
        and not accepts(loose, '{"a":' + " " * 17 + "[1,2]}")
    )


# Python may read sets as Rust does one day
@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^a|b$|c", ["a", "b"], ["ab"]),
        (r"a/b\/c", ["a/b/c"], ["a"]),
        ("a\nb", ["a\nb"], ["ab"]),
        (r"\\/ | \"x\"", ["\\/ "], ['"x"']),
        ("[[a]", ["[", "a"], ["[a"]),
        ("[a&&b]", ["a", "&", "b"], ["c"]),
        ("[+--]", ["+", ",", "-"], ["."]),
        ("[]a]", ["]", "a"], ["b"]),
        (r"[^\w]", ["-"], ["a", "\u00e9", "_"]),
        (r"\d\s", ["1 "], ["\u0661 "]),
        ("a#b (?:c)", ["a#b c"], ["a"]),
        ('start: "a"', ['start: "a"'], ["a"]),
    ],
)
def test_a_regular_expression_means_what_python_reads(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    follower = matcher(GuideType.REGEX, pattern)
    assert [
        text for text in right if not accepts(follower, text) or not re.fullmatch(pattern, text)
    ] == []
    assert [text for text in wrong if accepts(follower, text)] == []
