"""References of a JSON schema by `$id`, `$anchor` and pointer, written as pointers from
the root.
"""

from typing import Any

import pytest

from lmi.shared.json_references import with_pointers

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NEWEST = "https://json-schema.org/draft/2020-12/schema"
TEXT = {"type": "string"}


def pointer_of(schema: dict[str, Any]) -> object:
    """What stands for the reference under the property `a`."""
    return with_pointers(schema)["properties"]["a"]["$ref"]


@pytest.mark.parametrize(
    ("reference", "definition", "pointer"),
    [
        ("#named", {"$anchor": "named"}, "#/$defs/x"),
        ("https://example.com/root.json#named", {"$anchor": "named"}, "#/$defs/x"),
        ("https://example.com/root.json", {}, "#"),
        ("https://example.com/root.json#/$defs/x", {}, "#/$defs/x"),
        ("root.json#/$defs/x", {}, "#/$defs/x"),
        ("https://example.com/item.json", {"$id": "item.json"}, "#/$defs/x"),
        ("item.json", {"$id": "/item.json"}, "#/$defs/x"),
        ("urn:example:item", {"$id": "urn:example:item"}, "#/$defs/x"),
        (
            "urn:example:item#part",
            {"$id": "urn:example:item", "items": {"$anchor": "part"}},
            "#/$defs/x/items",
        ),
        (
            "urn:example:item#/properties/b~1c",
            {"$id": "urn:example:item"},
            "#/$defs/x/properties/b~1c",
        ),
        ("#/$defs/x", {"$id": "item.json"}, "#/$defs/x"),
    ],
)
def test_what_the_schema_names_is_a_pointer(
    reference: str, definition: dict[str, Any], pointer: str
) -> None:
    schema = {
        "$id": "https://example.com/root.json",
        "properties": {"a": {"$ref": reference}},
        "$defs": {"x": definition},
    }
    assert pointer_of(schema) == pointer


def test_a_reference_counts_from_the_id_around_it() -> None:
    schema = {
        "$defs": {
            "tree": {
                "$id": "https://example.com/tree",
                "items": {"$ref": "#"},
                "properties": {"b": {"$ref": "leaf"}},
            },
            "leaf": {"$id": "https://example.com/leaf", "type": "string"},
        }
    }
    tree = with_pointers(schema)["$defs"]["tree"]

    assert tree == {
        "items": {"$ref": "#/$defs/tree"},
        "properties": {"b": {"$ref": "#/$defs/leaf"}},
    }


def test_an_id_of_draft_4_has_its_name_there_alone() -> None:
    schema = {"properties": {"a": {"$ref": "#x"}}, "definitions": {"b": {"id": "#x", **TEXT}}}
    assert pointer_of({"$schema": DRAFT_4, **schema}) == "#/definitions/b"
    assert pointer_of(schema) == "#x"


@pytest.mark.parametrize(("draft", "place"), [(NEWEST, "inner"), (DRAFT_7, "outer")])
def test_an_id_beside_a_reference_counts_since_draft_2019(draft: str, place: str) -> None:
    schema = {
        "$schema": draft,
        "$id": "https://example.com/root",
        "properties": {"a": {"$id": "https://example.com/inner/", "$ref": "item"}},
        "$defs": {
            "inner": {"$id": "https://example.com/inner/item"},
            "outer": {"$id": "https://example.com/item"},
        },
    }
    assert pointer_of(schema) == f"#/$defs/{place}"

    del schema["$schema"]
    assert pointer_of(schema) == "https://example.com/inner/item", (
        "which reading is meant is not known"
    )


def test_what_looks_like_a_name_in_data_or_under_an_unknown_word_is_none() -> None:
    for keyword in ("enum", "const", "x-words"):
        schema = {"properties": {"a": {"$ref": "#x"}}, keyword: [{"$anchor": "x"}]}
        assert pointer_of(schema) == "#x"


def test_a_name_that_two_places_have_leads_nowhere() -> None:
    schema = {
        "properties": {"a": {"$ref": "#x"}},
        "$defs": {"b": {"$anchor": "x"}, "c": {"$anchor": "x"}},
    }
    assert pointer_of(schema) == "#x"


def test_a_reference_that_leads_nowhere_below_an_id_is_not_taken_for_one_from_the_root() -> None:
    schema = {
        "properties": {"a": {"$id": "https://example.com/b", "items": {"$ref": "#/$defs/c/none"}}},
        "$defs": {"c": TEXT},
    }
    reference = with_pointers(schema)["properties"]["a"]["items"]["$ref"]
    assert reference == "#/properties/a/$defs/c/none"


def test_a_dynamic_reference_within_one_resource_is_an_ordinary_one() -> None:
    schema = {"$dynamicAnchor": "node", "properties": {"a": {"$dynamicRef": "#node"}}}
    assert with_pointers(schema) == {"properties": {"a": {"$ref": "#"}}}

    recursive = {"$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}
    assert with_pointers(recursive)["items"] == {"$ref": "#"}


def test_a_schema_that_has_only_pointers_stays_as_it_is() -> None:
    schema = {
        "$id": "https://example.com/a",
        "items": {"$ref": "#/$defs/x"},
        "$defs": {"x": {"const": {"$id": "y"}}},
    }
    assert with_pointers(schema) is schema


def test_an_anchor_that_is_no_text_names_nothing() -> None:
    schema = {"$defs": {"x": {"$anchor": ["x"]}}, "properties": {"a": {"$ref": "#x"}}}
    assert with_pointers(schema) == schema
