"""Kinds of values: each parses the text of an option and says which values are allowed."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

LARGEST = 2**31 - 1
SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LENGTH_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
# The most seconds of an option, and the most milliseconds.
MOST_S = 1e7
WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


class TooLarge(ValueError):
    """A value is over a bound that `Kind.allowed` does not name. The text says what is allowed."""


class Kind(Struct, frozen=True):
    """One kind of value. `parse` turns a text into a value and raises ValueError for a text that is
    not allowed.
    """

    allowed: str
    parse: Callable[[str], Any]
    # The text that means None.
    unset: str = ""
    # All allowed words, if they are few.
    words: tuple[str, ...] = ()
    # What the help shows in the place of a value.
    unit: str = "VALUE"


def is_true(text: str, otherwise: bool = False) -> bool:
    """Return what a word for true or false means, or `otherwise` for any other text."""
    return WORDS.get(text.strip().lower(), otherwise)


def local_path(url: str) -> str:
    """Return the path of a `file:` URL, or any other text unchanged."""
    return unquote(urlsplit(url).path) if url.startswith("file:") else url


def integer(low: int, high: int = LARGEST) -> Kind:
    """Return the kind of whole numbers from `low` to `high`."""
    is_bounded = high != LARGEST

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,100}", text):
            raise ValueError

        number = int(text)
        if number > high and not is_bounded:
            raise TooLarge(f"a whole number {low}..{high}")

        if not low <= number <= high:
            raise ValueError

        return number

    bounds = f"{low}..{high}" if is_bounded else f"of at least {low}"
    return Kind(f"a whole number {bounds}", parse, unit="N")


def word(
    values: Mapping[str, Any], otherwise: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Return a parser of words, in any case, to their values. Other texts are parsed by
    `otherwise`, or refused.
    """

    def parse(text: str) -> Any:
        if text.lower() in values:
            return values[text.lower()]

        if otherwise is None:
            raise ValueError

        return otherwise(text)

    return parse


def choice(*words: str, **long_names: str) -> Kind:
    """Return the kind of one of `words`, in any case. `long_names` maps further names to them."""
    values = {text.lower(): text for text in words}
    return Kind(", ".join(words), word(values | long_names), words=words)


def matching(
    allowed: str, pattern: str, value_of: Callable[..., Any] = str, unit: str = "VALUE"
) -> Kind:
    """Return the kind of texts that match a pattern. `value_of` makes the value: of the groups of
    the pattern, or of the text if it has none.
    """

    def parse(text: str) -> Any:
        match = re.fullmatch(pattern, text)
        if match is None:
            raise ValueError

        return value_of(*(match.groups() or [text]))

    return Kind(allowed, parse, unit=unit)


def several(
    allowed: str,
    kind: Kind,
    split: Callable[[str], list[str]] = re.compile("[;,]").split,
    once: Callable[[Any], str] | None = None,
) -> Kind:
    """Return the kind of several values of another kind, with `;` or `,` between. No two of them
    may have in common what `once` returns of a value.
    """

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind.parse(part.strip()) for part in split(text))
        if once is not None:
            marks = {once(value) for value in values}
            if len(marks) < len(values):
                raise ValueError

        return tuple(dict.fromkeys(values))

    return Kind(allowed, parse)


def _seconds(text: str) -> float:
    value = float(text)
    if not (0 < value and math.isfinite(value)):
        raise ValueError

    if value > MOST_S:
        raise TooLarge(f"at most {MOST_S:.0f}")

    return value


def _delay(text: str) -> float:
    return 0.0 if float(text) == 0 else _seconds(text)


def _size(number: str, unit: str) -> int:
    size = int(number) * SIZE_UNITS[unit.lower()]
    if not size:
        raise ValueError

    if size >= 2**50:
        raise TooLarge("less than 2**50 bytes")

    return size


def _length(number: str, unit: str) -> int:
    """Return a length as vLLM reads it: k and m are decimal units, K and M binary ones."""
    length = round(float(number) * LENGTH_UNITS[unit])
    if length < 1:
        raise ValueError

    if length > LARGEST:
        raise TooLarge(f"at most {LARGEST} tokens, or auto")

    return length


TEXT = Kind("any text in UTF-8", str)
ABSOLUTE_PATH = matching("an absolute path", r"/[^\0]*")
BOOLEAN = Kind("true or false", word(WORDS))
SECONDS = Kind("seconds, more than 0", _seconds, unit="SECONDS")
DELAY = Kind("seconds, 0 or more", _delay, unit="SECONDS")
MILLISECONDS = Kind("milliseconds, more than 0", _seconds, unit="MS")
NO_SECONDS = dict.fromkeys(("none", "0", "-1"))
SECONDS_OR_NONE = Kind(
    "seconds, more than 0, or none", word(NO_SECONDS, _seconds), unset="none", unit="SECONDS"
)
SIZE = matching(
    "bytes, more than 0, as in 67108864, 64k, 64m or 1g",
    r"(?i)([0-9]{1,100})\s*([kmg]?)(?:i?b)?",
    _size,
    "BYTES",
)
LENGTH = matching("", r"([0-9]{1,100}(?:\.[0-9]{1,6}(?=[km]))?)([kmKM]?)", _length)
LENGTH_OR_AUTO = Kind(
    "a whole number of at least 1, as in 4096, 32k (32000) or 32K (32768), or auto",
    word({"auto": None, "-1": None}, LENGTH.parse),
    unit="TOKENS|auto",
)
NAME = matching(
    "1 to 128 letters, digits or ._:@-, a letter or digit first",
    r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}",
)
NAMES = several(f"names with ; between, each {NAME.allowed}", NAME)
# The kind of an option that names none, by the type of its field.
OF_TYPE = {
    "bool": BOOLEAN,
    "int": integer(1),
    "float": SECONDS,
    "float | None": SECONDS_OR_NONE,
    "str": TEXT,
}
