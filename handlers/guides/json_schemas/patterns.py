"""Regular expressions of strings and of names."""

import re

from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.subschema import Schema
from handlers.guides.json_schemas.values import check_text
from handlers.guides.rust_regex import rust_regex
from lmi.errors import shorten

# The escapes by which a pattern writes a control character.
CONTROL_ESCAPE = re.compile(r"\\(?:x[01][0-9A-Fa-f]|x7[Ff]|u00[01][0-9A-Fa-f]|u007[Ff]|[xu]\{|c|0)")


def pattern_of(pattern: str) -> str:
    """The pattern as llguidance reads it."""
    check_text(pattern)
    escape = CONTROL_ESCAPE.search(pattern)
    if escape is not None:
        raise SchemaFault(f"the escape {escape[0]} of a control character in {shorten(pattern)}")

    try:
        return rust_regex(pattern, is_in_json=True)
    except ValueError as error:
        raise SchemaFault(f"{shorten(pattern)}: {error}, so it") from None


def num_patterns(followed: Schema) -> int:
    """How many patterns a string must fit at once."""
    number = int("pattern" in followed)
    for part in followed.get("allOf", ()):
        if isinstance(part, dict):
            number += num_patterns(part)

    return number
