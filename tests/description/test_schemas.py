"""A form in short becomes the schema that takes its values, and null where that is one of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from lmi.description.schemas import Form, or_null, schema_of

VALUES = (None, True, 3, 0.5, "a", "b", {}, {"a": 1}, [], [3], ["a"])


def taken(schema: dict[str, Any]) -> list[object]:
    """Those of VALUES that fit a schema."""
    validator = jsonschema.Draft202012Validator(schema)
    return [value for value in VALUES if validator.is_valid(value)]


@pytest.mark.parametrize(
    ("form", "values"),
    [
        (None, [None]),
        (int, [3]),
        (int | None, [None, 3]),
        (None | int, [None, 3]),
        (int | str, [3, "a", "b"]),
        (int | str | None, [None, 3, "a", "b"]),
        (("a",), ["a"]),
        ([int], [[], [3]]),
    ],
)
def test_a_form_takes_the_values_of_each_of_its_types(form: Form, values: list[object]) -> None:
    assert taken(schema_of(form)) == values


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"enum": ["a"]},
        {"type": "string", "enum": ["a"]},
        {"type": "string", "const": "a"},
        {"type": ["string", "integer"]},
        {"type": "object", "anyOf": [{"required": ["a"]}]},
        {"type": "object", "properties": {"a": {"type": "integer"}}},
    ],
)
def test_null_is_added_to_any_schema(schema: dict[str, Any]) -> None:
    assert taken(or_null(schema)) == [None, *taken(schema)]


@pytest.mark.parametrize("form", [bytes, list, [int, str]])
def test_a_form_that_is_none_is_an_error(form: Any) -> None:
    with pytest.raises((KeyError, ValueError)):
        schema_of(form)
