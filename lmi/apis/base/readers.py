"""Readers that every JSON API uses: for a whole body, and for one field of it.

A reader of a field takes its name and its value. It returns the checked value, or raises an error
that names field, rule and shortened value. Types are strict: `true` and "5" are not numbers, but an
integer is also a float, and a float that is whole is also an integer, as in JSON Schema: R, Lua and
MATLAB write 5.0.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar

import msgspec
import orjson
from msgspec.structs import force_setattr

from lmi.errors import InvalidParameter, MalformedRequest, Unsupported, shorten
from lmi.executor import DEFAULT_PRIORITY, MAX_SEED, PRIORITY_STEPS
from lmi.executor.checks import MAX_INT, int_fault, range_fault
from lmi.settings.config import GenerationDefaults, SamplingDefaults
from lmi.types import Format, GenerationRequest

LEFT_OUT = (msgspec.Raw(), msgspec.Raw(b"null"))
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The bodies of one path differ by these fields.
PROMPTS = ("inputs", "messages", "prompt")
KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
# Each token is searched for all of them.
MAX_STOP_SEQUENCES = 64
# The most bad words, and the most ids of stop_token_ids.
MAX_WORDS = 1024
MAX_WORD_BYTES = 1024
MAX_SALT_CHARS = 128
# The most lines for the log of one request.
MAX_IGNORED = 32
MAX_VALUES_BYTES = 1 << 20
"""Of a body without its prompt. A text may fill a whole body, but sixty megabytes of small values
take ten seconds to create and free, and the front end answers no other request meanwhile.
"""

MARK = b"\xef\xbb\xbf"
"""The byte order mark that PowerShell and .NET write before UTF-8. RFC 8259 lets
readers skip it.
"""

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


class BodyOutline(msgspec.Struct):
    """The fields that are looked at before a schema reads a body. They stay raw, so a long prompt
    costs little time.
    """

    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text_input: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    adapters: msgspec.Raw = msgspec.Raw()
    request_type: msgspec.Raw = msgspec.field(name="requestType", default=msgspec.Raw())

    @classmethod
    def of(cls, body: bytes) -> Self | None:
        """Return the outline of a body, or None if it is not the JSON of an object. Its schema
        reports the fault.
        """
        try:
            return msgspec.json.decode(without_mark(body), type=cls)
        except UNREADABLE:
            return None

    def has(self, field: str) -> bool:
        """Whether the body has the field. null means "left out"."""
        return getattr(self, field) not in LEFT_OUT

    def value(self, field: str) -> object:
        """Return the value of a field, or None if it is left out or cannot be read."""
        try:
            return msgspec.json.decode(getattr(self, field))
        except UNREADABLE:
            return None


class Message(msgspec.Struct, Generic[Format], frozen=True):
    """A decoded body: its fields, the format of its answer, and the defaults that its API may
    apply.

    The LMI APIs apply those of the engine, the APIs of OpenAI and Anthropic those of the model.
    """

    fields: dict[str, Any]
    format: Format
    sampling_defaults: SamplingDefaults | None = None
    generation_defaults: GenerationDefaults = GenerationDefaults()


class Parsed(msgspec.Struct, Generic[Format], frozen=True):
    """The requests of a body, one or several that are answered together, and the format of their
    answer.

    `ignored` has a line for the log for each name in the body that has no effect, of the first
    MAX_IGNORED.
    """

    requests: tuple[GenerationRequest, ...]
    format: Format
    ignored: Sequence[str] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "ignored", tuple(self.ignored[:MAX_IGNORED]))

    @property
    def num_sequences(self) -> int:
        """How many sequences the engines generate for the body."""
        return sum(request.num_sequences for request in self.requests)

    @property
    def num_places(self) -> int:
        """How many places the requests take in queues."""
        return sum(request.num_places for request in self.requests)

    @property
    def request(self) -> GenerationRequest:
        """The only request."""
        [request] = self.requests
        return request


def without_mark(body: bytes) -> bytes:
    """Return a body, or a line of one, without the byte order mark before it. Whatever decodes the
    JSON of a client calls this first.
    """
    return body.removeprefix(MARK)


def check_values(body: bytes, max_texts: int = 0) -> None:
    """Raise MalformedRequest if a body has over MAX_VALUES_BYTES without its prompt, which may be
    `max_texts` texts.
    """

    def num_prompt_bytes(body: bytes) -> int:
        outline = msgspec.json.decode(body, type=BodyOutline)
        num_bytes = 0
        for prompt in (outline.inputs, outline.text_input, outline.prompt, outline.input):
            num_bytes = max(num_bytes, _num_text_bytes(bytes(prompt), max_texts))

        return num_bytes

    check_size(body, num_prompt_bytes, "an object", "the prompt's text")


def check_size(body: bytes, num_text_bytes: Callable[[bytes], int], kind: str, texts: str) -> None:
    """Raise MalformedRequest if all but the `texts` of a body have over MAX_VALUES_BYTES, or if it
    is not the JSON of `kind`.
    """
    if len(body) <= MAX_VALUES_BYTES:
        return

    try:
        num_bytes = len(body) - num_text_bytes(without_mark(body))
    except UNREADABLE as error:
        raise MalformedRequest(f"the body is not the JSON of {kind}: {error}") from None

    if num_bytes > MAX_VALUES_BYTES:
        raise MalformedRequest(
            f"all but {texts} must have at most {MAX_VALUES_BYTES} bytes, not {num_bytes}"
        )


def _num_text_bytes(prompt: bytes, max_texts: int) -> int:
    """Return the length of a prompt that is a text or a list of at most `max_texts`
    texts, else 0.
    """
    if prompt[:1] == b'"':
        return len(prompt)

    # A text has two quotes that are not escaped, or fewer if it ends with a backslash.
    num_quotes = prompt.count(b'"') - prompt.count(b'\\"')
    if prompt[:1] != b"[" or num_quotes > 2 * max_texts:
        return 0

    try:
        msgspec.json.decode(prompt, type=list[str])
    except UNREADABLE:
        return 0

    return len(prompt)


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a body that is one JSON object. Raises MalformedRequest."""
    body = without_mark(body)
    if not body.strip():
        raise MalformedRequest("the body is empty, a JSON object is needed")

    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fault = error.msg
        text_at_fault = error.doc[error.pos : error.pos + 9].lstrip("-")
        if text_at_fault.startswith(("NaN", "Infinity")):
            fault = "NaN and Infinity are no JSON numbers"

        place = f"line {error.lineno} column {error.colno}"
        raise MalformedRequest(f"the body is not JSON: {fault}: {place}") from None

    if not isinstance(value, dict):
        raise MalformedRequest(f"the body must be a JSON object, not {KINDS[type(value)]}")

    return value


def is_text(content_type: str | None) -> bool:
    """Whether a body of this type is the text of a prompt. Any other type is read as JSON."""
    return content_type is not None and content_type.strip().lower().startswith("text/plain")


def read_inputs(body: bytes, content_type: str | None, max_texts: int = 0) -> dict[str, Any]:
    """Decode a body that is a JSON object, or the text of a prompt. Raises MalformedRequest."""
    if not is_text(content_type):
        check_values(body, max_texts)
        return read_object(body)

    try:
        return {"inputs": without_mark(body).decode()}
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"the body is not UTF-8: byte {error.start} is wrong") from None


def check_types(fields: dict[str, Any], *, has_stream: bool = True) -> None:
    """Raise MalformedRequest if `parameters` or `stream` is of a wrong type."""
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict | None):
        raise MalformedRequest(f"parameters must be an object, given {shorten(parameters)}")

    stream = fields.get("stream")
    if has_stream and not isinstance(stream, bool | None):
        raise MalformedRequest(f"stream must be true or false, given {shorten(stream)}")


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
