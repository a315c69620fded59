"""Arguments of an engine's library that options name, and what is said of a wrong one. It imports
no library.
"""

import ast
import difflib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lmi.errors import BadConfiguration, shorten
from lmi.settings.config import EngineConfig
from lmi.settings.handler import folder_of
from lmi.settings.kinds import BOOLEAN
from lmi.settings.table import OPTIONS

# The options, without their prefix, by the fields of an EngineConfig that they fill.
OPTION_OF = {
    option.field.removeprefix("engine."): option.key.removeprefix("option.") for option in OPTIONS
}
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

log = logging.getLogger("lmi.options")


def fields_by_class(library: str, *place: str) -> Mapping[str, frozenset[str]]:
    """The annotated public fields of each class in a file of a library, with those that it inherits
    there.

    The file is read and not run. There are none if the library is not installed, or only a stub of
    it.
    """
    folder = folder_of(library)
    if not folder:
        return {}

    file = folder.joinpath(*place)
    return _fields_in(file) if file.is_file() else {}


@functools.cache
def _fields_in(file: Path) -> Mapping[str, frozenset[str]]:
    """The file is large, and it does not change while we run."""
    fields: dict[str, frozenset[str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue

        names: set[str] = set()
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name)) if name[0] != "_":
                    names.add(name)

        for base in node.bases:
            if isinstance(base, ast.Name):
                names |= fields.get(base.id, frozenset())

        fields[node.name] = frozenset(names)

    return fields


def boolean(text: str) -> bool:
    """Raises ValueError with the allowed values."""
    try:
        return bool(BOOLEAN.parse(text))
    except ValueError:
        raise ValueError(BOOLEAN.allowed) from None


def named(config: EngineConfig, name: str, text: str | None = None) -> str:
    """option.NAME=TEXT (SOURCE) for messages, as far as text and source are known."""
    text = text if text is not None else config.options.get(name)
    source = config.option_sources.get(name)
    option = f"option.{name}"
    if text is not None:
        option += f"={shorten(text)}"

    if source:
        option += f" ({source})"

    return option


def tell_unknown(
    config: EngineConfig, message: str, name: str, names: Iterable[str], faults: list[str]
) -> None:
    """Report an option that names no argument, with the closest of the `names` that there are: as a
    fault if options are strict.
    """
    nearest = difflib.get_close_matches(name, [*names], 1, 0.75)
    if nearest:
        message += f"; the closest one is option.{nearest[0]}"

    if config.strict:
        faults.append(message)
    else:
        log.warning("%s", message)


def refusal(
    error: BaseException, name_of: Callable[[tuple[int | str, ...]], str]
) -> BadConfiguration | None:
    """The faults that a library's pydantic found in values, a line for each place, or None for
    another error. `name_of` names a place.
    """
    # The record of a handler is imported without pydantic.
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return None

    lines = []
    for fault in error.errors():
        line = first_line(fault["msg"].removeprefix("Value error, "))
        if fault["loc"]:
            line = f"{name_of(fault['loc'])}: {line}"

        lines.append(line)

    return BadConfiguration("\n".join(lines))


def first_line(text: str) -> str:
    """The first line of what a library says, shortened."""
    return shorten(text.partition("\n")[0], 300)[1:-1]
