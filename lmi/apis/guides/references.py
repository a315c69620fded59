"""The references in a client's JSON schema.

A schema that refers to another document is refused, because nothing is fetched, and that part would
be left without structure.
"""

from typing import Any

from lmi.errors import InvalidParameter
from lmi.shared.json_references import resolve_pointer, with_pointers

MAX_REFERENCES_IN_A_ROW = 100
REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
RULE = "begins with # or with an $id of the schema"
# The keywords whose value has a schema under each name that the client likes.
SCHEMAS_BY_NAME = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)
# The keywords whose value is no schema, whatever it holds.
NO_SCHEMAS = (
    "const",
    "enum",
    "default",
    "examples",
)


def checked_references(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema in the field `name` with a pointer as each reference, whatever names it
    gave to its parts.

    Raises InvalidParameter if one of REFERENCES points outside the schema, or back to itself.
    """
    schema = with_pointers(schema)
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value

        if not isinstance(value, dict):
            continue

        for key in REFERENCES & value.keys():
            if not str(value[key]).startswith("#"):
                rule = f"a JSON schema in which every {key} {RULE}"
                raise InvalidParameter(name, rule, value[key])

        _check_end(name, schema, value)
        for key, inner in value.items():
            if key in SCHEMAS_BY_NAME and isinstance(inner, dict):
                pending += inner.values()
            elif key not in NO_SCHEMAS:
                pending.append(inner)

    return schema


def _check_end(name: str, schema: dict[str, Any], value: Any) -> None:
    """Raise InvalidParameter if a $ref leads to nothing but further ones: no text fits such a
    schema, and an engine that followed its references might never end.
    """
    reference = None
    for _ in range(MAX_REFERENCES_IN_A_ROW):
        if not isinstance(value, dict) or not isinstance(value.get("$ref"), str):
            return

        reference = value["$ref"]
        value = resolve_pointer(schema, reference)

    raise InvalidParameter(name, "a JSON schema in which no $ref leads back to itself", reference)
