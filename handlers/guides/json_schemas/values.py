"""The values that a schema lists, and what an answer is able to write."""

import re

from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.subschema import Schema
from lmi.errors import shorten

# A larger integer is rounded where numbers are doubles. Every larger float is whole too, so it is
# refused alike.
MAX_INTEGER = 2**53
# The characters that a string of an answer never has: control characters, and halves of others.
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


def values_of(keywords: Schema) -> Schema:
    """Return `enum` and `const`. Raises SchemaFault for a value that no answer can write."""
    for value in [*keywords.get("enum", ()), keywords.get("const")]:
        check_value(value)

    return {name: keywords[name] for name in ("enum", "const") if name in keywords}


def check_value(value: object) -> None:
    """Raise SchemaFault unless an answer can write a value, with all that is in it."""
    if isinstance(value, str):
        check_text(value)

    # The condition holds of NaN too.
    if isinstance(value, int | float) and not abs(value) <= MAX_INTEGER:
        raise SchemaFault(f"the number {shorten(value)}, beyond ±{MAX_INTEGER},")

    if isinstance(value, list):
        for entry in value:
            check_value(entry)

    if isinstance(value, dict):
        for name, entry in value.items():
            check_value(name)
            check_value(entry)


def check_text(text: str) -> None:
    """Raise SchemaFault unless an answer may have all characters of a text."""
    unwritable = UNWRITABLE.search(text)
    if unwritable is not None:
        raise SchemaFault(f"the character U+{ord(unwritable[0]):04X} in {shorten(text)}")


def names_in(value: object, keyword: str) -> list[str]:
    """Return the names that `keyword` lists, each once. Raises SchemaFault if it lists none."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaFault(f"{keyword} of a wrong type")

    return list(dict.fromkeys(value))
