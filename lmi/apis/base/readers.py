"""Readers of the fields of a body, which every JSON API uses.

A reader takes the name of a field and its value. It returns the checked value, or raises an error
that names field, rule and shortened value. Types are strict: `true` and "5" are not numbers, but an
integer is also a float, and a float that is whole is also an integer, as in JSON Schema: R, Lua and
MATLAB write 5.0.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson

from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import DEFAULT_PRIORITY, MAX_SEED, PRIORITY_STEPS
from lmi.executor.checks import MAX_INT, int_fault, range_fault

# Each token is searched for all of them.
MAX_STOP_SEQUENCES = 64
# The most bad words, and the most ids of stop_token_ids.
MAX_WORDS = 1024
MAX_WORD_BYTES = 1024
MAX_SALT_CHARS = 128

Reader = Callable[[str, object], Any]
Typed = TypeVar("Typed", bound=Reader)


def takes(schema: dict[str, Any]) -> Callable[[Typed], Typed]:
    """Record on a reader the JSON Schema of the values that it takes.

    The schema is kept on the reader and in no table, so that it is freed with the reader.
    """

    def note(reader: Typed) -> Typed:
        reader.json_schema = schema  # type: ignore[attr-defined]
        return reader

    return note


def json_schema_of(reader: Reader) -> dict[str, Any]:
    """Return the JSON Schema of the values that a reader takes, for /openapi.json: {} where it
    takes any value.
    """
    schema: dict[str, Any] = getattr(reader, "json_schema", {})
    return schema


def anything(name: str, value: object) -> object:
    """Read a value that is checked later, together with others."""
    return value


def checked(
    schema: dict[str, Any],
    fault: Callable[[Any], str],
    convert: Callable[[Any], Any] = lambda value: value,
) -> Reader:
    """Make a reader of values of a schema. `fault` returns the rule that a value breaks, or "" for
    a good one, which `convert` then converts.
    """

    @takes(schema)
    def read(name: str, value: object) -> Any:
        if rule := fault(value):
            raise InvalidParameter(name, rule, value)

        return convert(value)

    return read


def integer(minimum: int = -MAX_INT, maximum: int = MAX_INT) -> Reader:
    """Make a reader of an integer from `minimum` to `maximum`."""

    def fault(value: object) -> str:
        return int_fault(_as_integer(value), minimum, maximum)

    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return checked(schema, fault, _as_integer)


def _as_integer(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)

    return value


# vLLM and llama.cpp leave a seed out by this number, which interfaces write.
DRAWS_A_SEED = -1
SEED = integer(DRAWS_A_SEED, MAX_SEED)


@takes(json_schema_of(SEED))
def seed(name: str, value: object) -> int | None:
    """Read a seed. None means that one is drawn, as if the field were left out."""
    number = SEED(name, value)
    return None if number == DRAWS_A_SEED else number


def _salt_fault(value: object) -> str:
    if isinstance(value, str) and len(value) <= MAX_SALT_CHARS and SALT.fullmatch(value):
        return ""

    return rf"a string of 1 to {MAX_SALT_CHARS} characters, without @, /, \ and NUL"


boolean = checked(
    {"type": "boolean"}, lambda value: "" if isinstance(value, bool) else "true or false"
)
text = checked({"type": "string"}, lambda value: "" if isinstance(value, str) else "a string")
# vLLM's rule. It keeps out marks that have a meaning in the keys of some caches.
SALT = re.compile(r"[^@/\\\x00]+")
cache_salt = checked(
    {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS, "pattern": r"^[^@/\\\x00]*$"},
    _salt_fault,
)
an_object = checked(
    {"type": "object"}, lambda value: "" if isinstance(value, dict) else "an object"
)
RANK = integer(-PRIORITY_STEPS // 2, PRIORITY_STEPS // 2)


@takes({"type": ["string", "array"], "items": {"type": "string"}, "maxItems": 1})
def adapter(name: str, value: object) -> str | None:
    """Read the name of a LoRA adapter, a string or a list of one. None means the base model."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]

    if not isinstance(value, str | None):
        raise InvalidParameter(name, "a string or a list of one", value)

    return value or None


@takes(json_schema_of(RANK))
def priority(name: str, value: object) -> float:
    """Read vLLM's priority, where a lower number is more urgent, and return the contract's."""
    return DEFAULT_PRIORITY - RANK(name, value) / PRIORITY_STEPS  # type: ignore[no-any-return]


def number(low: float = -math.inf, high: float = math.inf, *, low_open: bool = False) -> Reader:
    """Make a reader of a finite number in [low, high], or in (low, high] with `low_open`."""
    schema: dict[str, Any] = {"type": "number"}
    limits = {"exclusiveMinimum" if low_open else "minimum": low, "maximum": high}
    for name, limit in limits.items():
        if math.isfinite(limit):
            schema[name] = limit

    return checked(schema, lambda value: range_fault(value, low, high, low_open=low_open), float)


def choice(allowed: Sequence[str]) -> Reader:
    """Make a reader of one of these words. Like every reader it is made once, when its module is
    imported.
    """
    rule = "one of " + ", ".join(allowed)

    def fault(value: object) -> str:
        return "" if isinstance(value, str) and value in allowed else rule

    return checked({"enum": list(allowed)}, fault)


def refused(reason: str, *off: object) -> Reader:
    """Make a reader that refuses every value but those in `off`, which ask for nothing."""

    def read(name: str, value: object) -> None:
        for off_value in off:
            if value == off_value and type(value) is type(off_value):
                return

        raise Unsupported(name, reason)

    return read


def list_of(read_item: Reader, items: str, max_items: int, *, is_numbered: bool = False) -> Reader:
    """Make a reader of a list, whose `items` have this name in errors. With `is_numbered` an error
    names the item, else only the list.
    """

    @takes({"type": "array", "items": json_schema_of(read_item), "maxItems": max_items})
    def read(name: str, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise InvalidParameter(name, f"a list of {items}", value)

        if len(value) > max_items:
            raise InvalidParameter(name, f"a list of at most {max_items} {items}", value)

        if not is_numbered:
            return tuple(read_item(name, member) for member in value)

        return tuple(read_item(f"{name}[{i}]", member) for i, member in enumerate(value))

    return read


def check_levels(name: str, value: dict[str, Any]) -> bytes:
    """Return the JSON of an object. Raises InvalidParameter if it has too many levels."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # The object has more than 254 levels.
        raise InvalidParameter(name, "an object of fewer levels", value) from None


def _word_fault(value: object) -> str:
    if not isinstance(value, str) or not value:
        return "a list of non-empty strings"

    if len(value.encode()) > MAX_WORD_BYTES:
        return f"a list of strings of at most {MAX_WORD_BYTES} bytes"

    return ""


WORD = checked({"type": "string", "minLength": 1, "maxLength": MAX_WORD_BYTES}, _word_fault)
strings = partial(list_of, WORD, "strings")
token_ids = partial(list_of, integer(0), "token ids", is_numbered=True)
