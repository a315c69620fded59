"""The patterns by which an adapter's configuration names linears, of which only plain names are
allowed.
"""

import re
from collections.abc import Iterable

from lmi.errors import shorten

_NAME = re.compile(r"(\^|\.\*\\\.)?((?:[\w-]|\\?\.)+)\$?")
MAX_NAME_CHARS = 1000


def check_names(**fields: Iterable[str] | None) -> None:
    """Raise ValueError for a pattern of a configuration that is more than a name, or the end of
    one.

    A stranger may have written it, and some patterns would keep Python's `re` busy for ever.
    """
    for field, patterns in fields.items():
        for pattern in patterns or ():
            if len(pattern) > MAX_NAME_CHARS or not _NAME.fullmatch(pattern):
                raise ValueError(
                    f"{field} has {shorten(pattern)}, which is more than a name: list the names "
                    f"instead"
                )


def is_end(pattern: str, path: str) -> bool:
    """Whether a pattern that was checked is a path, or what is behind one of its dots, as PEFT
    compares them.
    """
    sign, name = _NAME.fullmatch(pattern).groups()  # type: ignore[union-attr]
    name = name.replace("\\", "")
    return (path == name and sign != r".*\.") or (path.endswith(f".{name}") and sign != "^")
