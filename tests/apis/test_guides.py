"""Structures that a request asks for by their fields, and schemas that refer elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmi.apis import batch as dynamic_batch
from lmi.apis.guides.fields import asked_guide, json_schema
from lmi.apis.lmi import schema as lmi
from lmi.apis.openai import chat_schema as openai_chat, schema as openai
from lmi.apis.tgi import schema as tgi
from lmi.apis.triton import schema as triton
from lmi.errors import InvalidParameter
from lmi.settings.config import ModelConfig
from lmi.types import OutputFormat

MODEL = ModelConfig(path="demo", name="demo", tool_call_parser="hermes")
ELSEWHERE = [
    "http://127.0.0.1:9/x",
    "file:///etc/passwd",
    "other.json#/$defs/a",
    "definitions.json",
]
PLACES: list[Any] = [
    lambda ref: ref,
    lambda ref: {"properties": {"a": ref}},
    lambda ref: {"properties": {"$ref": ref}},
    lambda ref: {"properties": {"enum": ref}},
    lambda ref: {"items": [{"anyOf": [{}, ref]}]},
    lambda ref: {"$defs": {"const": ref}},
    lambda ref: {"not": {"additionalProperties": ref}},
]
INSIDE: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
    {"properties": {"a": {"$ref": "#"}}},
    {
        "$ref": "#/$defs/a~1b/anyOf/1",
        "$defs": {"a/b": {"anyOf": [{}, {"items": {"$ref": "#/$defs/a%2Fb"}}]}},
    },
    {"$ref": "#/$defs/none"},
    {"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}, {"$ref": "#/anyOf/7"}]},
    {"properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
    {"const": {"$ref": "http://127.0.0.1:9/x"}},
    {"enum": [{"$ref": "x"}], "default": {"$ref": "x"}, "examples": [{"$ref": "x"}]},
]
FAR: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": FAR}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": FAR}}
SAID = {"messages": [{"role": "user", "content": "Hi"}]}
EVERYWHERE: list[tuple[Any, dict[str, Any], str]] = [
    (openai, {"prompt": "a", "guided_json": FAR}, "guided_json"),
    (openai, {"prompt": "a", "guided_json": json.dumps(FAR)}, "guided_json"),
    (openai, {"prompt": "a", "structured_outputs": {"json": FAR}}, "structured_outputs.json"),
    (openai_chat, SAID | {"response_format": FORM}, "response_format.json_schema.schema"),
    (openai_chat, SAID | {"tools": [TOOL]}, "tools[0].function.parameters"),
    (openai_chat, SAID | {"tools": [TOOL], "tool_choice": "none"}, "tools[0].function.parameters"),
    (lmi, {"inputs": "a", "parameters": {"guided_json": FAR}}, "parameters.guided_json"),
    (
        dynamic_batch,
        {"inputs": ["a"], "parameters": {"response_format": FORM}},
        "parameters.response_format.json_schema.schema",
    ),
    (
        tgi,
        {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": FAR}}},
        "parameters.grammar.value",
    ),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reference", ELSEWHERE)
def test_a_schema_that_refers_to_elsewhere_is_refused_wherever_it_does(
    reference: str, place: Any
) -> None:
    with pytest.raises(
        InvalidParameter, match=r"^field must be .* every \$ref begins with # or .*, given "
    ):
        json_schema("field", place({"$ref": reference}))


@pytest.mark.parametrize("key", ["$dynamicRef", "$recursiveRef", "$ref"])
@pytest.mark.parametrize("reference", ["http://elsewhere.example/x", 5])
def test_the_kin_of_a_reference_leads_nowhere_either(key: str, reference: object) -> None:
    with pytest.raises(InvalidParameter, match=rf"every \{key} begins with #"):
        json_schema("field", {"anyOf": [{key: reference}]})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": ""},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {
            "items": {"$ref": "#/$defs/a"},
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        },
    ],
)
def test_a_reference_that_leads_back_to_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidParameter,
        match=r"^field must be a JSON schema in which no \$ref leads back to itself",
    ):
        json_schema("field", schema)


@pytest.mark.parametrize("schema", INSIDE)
def test_a_schema_that_is_whole_in_itself_is_taken(schema: dict[str, Any]) -> None:
    assert json.loads(json_schema("field", schema).guide or "") == schema


def test_an_engine_gets_pointers_in_place_of_the_names_in_a_schema() -> None:
    schema = {
        "$id": "urn:example:root",
        "items": {"$ref": "#named"},
        "$defs": {"a": {"$anchor": "named"}},
    }
    assert json.loads(json_schema("field", schema).guide or "") == {
        "items": {"$ref": "#/$defs/a"},
        "$defs": {"a": {}},
    }


def test_a_word_that_looks_like_a_keyword_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {
        "properties": {"minium": {"minium": 5, "x-order": 1}, "a": {"markdownDescription": "b"}},
        "additonalProperties": False,
    }
    with caplog.at_level("INFO"):
        assert json.loads(json_schema("field", schema).guide or "") == schema

    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("field: words that are no keywords of JSON Schema have no effect: ")
    assert (
        "'additonalProperties' (perhaps additionalProperties)" in line
        and "'minium' (perhaps minimum)" in line
    )

    caplog.clear()
    json_schema("field", {"x-order": 1, "nullable": True, "markdownDescription": "b"})

    assert caplog.records == []


def test_a_schema_of_many_odd_words_is_not_searched_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever sends so many holds up the event loop for half a second."""
    odd = {f"x-order-{number}": 1 for number in range(5_000)}
    misspelt = {f"maxPropertie{letter}": 1 for letter in "abcdefgh"}

    with caplog.at_level("INFO"):
        json_schema("field", odd | misspelt)
        assert caplog.records == []

        json_schema("field", misspelt)

    (line,) = (record.getMessage() for record in caplog.records)
    assert line.count("perhaps maxProperties") == 4


@pytest.mark.parametrize(("api", "body", "field"), EVERYWHERE)
def test_every_field_that_carries_a_schema_is_looked_through(
    api: Any, body: dict[str, Any], field: str
) -> None:
    message = api.read(json.dumps(body).encode(), None, MODEL)
    with pytest.raises(InvalidParameter) as caught:
        api.parse(message)

    assert str(caught.value).startswith(f"{field} must be ") and "$ref" in str(caught.value)


def test_triton_s_guide_is_looked_through_too() -> None:
    body = {
        "text_input": "a",
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps(FAR),
    }
    message = triton.read(json.dumps(body).encode(), None, MODEL, output_format=OutputFormat.JSON)
    with pytest.raises(InvalidParameter, match=r"^input 'guided_decoding_guide' must be .*\$ref"):
        triton.parse(message)


def test_two_structures_are_refused_by_the_name_of_the_second() -> None:
    guides = {"guided_regex": json_schema("a", {}), "guided_json": json_schema("b", {})}
    with pytest.raises(
        InvalidParameter,
        match=r"^parameters\.guided_regex must be left out beside parameters\.guided_json",
    ):
        asked_guide(guides, "parameters.")

    assert asked_guide({}) == (None, None)
