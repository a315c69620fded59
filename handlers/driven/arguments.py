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
from lmi.settings.values import OPTIONS

# The options, without their prefix, by the fields of an EngineConfig that they fill.
OPTION_OF = {one.field.removeprefix("engine."): one.key.removeprefix("option.") for one in OPTIONS}
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

log = logging.getLogger("lmi.options")


def fields_by_class(library: str, *place: str) -> Mapping[str, frozenset[str]]:
    """The annotated public fields of each class in a file of a library, with those that it inherits
    there.

    The file is read and not run. There are none if the library is not installed, or only a stub of
    it.
    """
    folder = folder_of(library)
    file = folder.joinpath(*place) if folder else None
    return _fields_in(file) if file is not None and file.is_file() else {}


@functools.cache
def _fields_in(file: Path) -> Mapping[str, frozenset[str]]:
    """The file is large, and it does not change while we run."""
    found: dict[str, frozenset[str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            targets = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            names = {
                target.id
                for target in targets
                if isinstance(target, ast.Name) and target.id[0] != "_"
            }
            inherited = (
                found.get(base.id, frozenset()) for base in node.bases if isinstance(base, ast.Name)
            )
            found[node.name] = frozenset(names).union(*inherited)

    return found


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
    return (
        f"option.{name}"
        + (f"={shorten(text)}" if text is not None else "")
        + (f" ({source})" if source else "")
    )


def tell_unknown(
    config: EngineConfig, said: str, name: str, known: Iterable[str], faults: list[str]
) -> None:
    """Report an option that names no argument, with the closest one that there is: as a fault if
    options are strict.
    """
    nearest = difflib.get_close_matches(name, [*known], 1, 0.75)
    said += f"; the closest one is option.{nearest[0]}" if nearest else ""
    if config.strict:
        faults.append(said)
    else:
        log.warning("%s", said)


def refusal(
    error: BaseException, named: Callable[[tuple[int | str, ...]], str]
) -> BadConfiguration | None:
    """The faults that a library's pydantic found in values, a line for each place, or None for
    another error.
    """
    from pydantic import ValidationError  # the record of a handler is imported without it

    if not isinstance(error, ValidationError):
        return None

    lines = []
    for fault in error.errors():
        said = first_line(fault["msg"].removeprefix("Value error, "))
        lines.append(f"{named(fault['loc'])}: {said}" if fault["loc"] else said)

    return BadConfiguration("\n".join(lines))


def first_line(text: str) -> str:
    """The first line of what a library says, shortened."""
    return shorten(text.partition("\n")[0], 300)[1:-1]
