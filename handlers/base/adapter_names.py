"""The names of linears in an adapter's configuration.

PEFT reads them as patterns. Only plain names are allowed here, or the ends of names.
"""

import re
from collections.abc import Iterable

from lmi.errors import shorten

# The beginning of a pattern that says that a path ends with the name.
_ANY_BEFORE = r".*\."
# A name, perhaps behind ^ or _ANY_BEFORE and before $. Its dots may be escaped.
_NAME = re.compile(r"(\^|\.\*\\\.)?((?:[\w-]|\\?\.)+)\$?")
MAX_NAME_CHARS = 1000


def check_names(**fields: Iterable[str] | None) -> None:
    """Raise ValueError for a pattern that is more than a name, or the end of one.

    `fields` are the patterns by the field of the configuration that has them. A stranger may have
    written them, and some patterns would keep Python's `re` busy for ever.
    """
    for field, patterns in fields.items():
        for pattern in patterns or ():
            if len(pattern) > MAX_NAME_CHARS or not _NAME.fullmatch(pattern):
                raise ValueError(
                    f"{field} has {shorten(pattern)}, which is more than a name: list the names "
                    f"instead"
                )


def is_end(pattern: str, path: str) -> bool:
    """Whether a path is the name in a pattern that was checked, or ends with it behind a dot.

    As in PEFT, ^ allows only the first, and `.*\\.` only the second.
    """
    match = _NAME.fullmatch(pattern)
    assert match is not None
    beginning = match[1]
    name = match[2].replace("\\", "")
    if path == name:
        return beginning != _ANY_BEFORE

    return path.endswith(f".{name}") and beginning != "^"
