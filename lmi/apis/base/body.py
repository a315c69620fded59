"""A body of JSON on its way to requests.

A `BodyOutline` has the few fields by which its API and model are found. It is decoded under limits
to a `Message`, and the schema of the API makes the `Parsed` requests of that.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Self

import msgspec
import orjson
from msgspec.structs import force_setattr

from lmi.errors import MalformedRequest, shorten
from lmi.settings.config import GenerationDefaults, SamplingDefaults
from lmi.types import Format, GenerationRequest

# The values in an outline of fields that are missing or null.
LEFT_OUT = (msgspec.Raw(), msgspec.Raw(b"null"))
# What decoding raises for bytes that are not the JSON that is looked for.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The fields that hold the prompt of a request for text.
PROMPTS = ("inputs", "messages", "prompt")
# What errors call a value of JSON.
KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
# The most lines in the log about one request.
MAX_IGNORED = 32
# The most bytes of a body without its prompt. A text may fill a whole body, but sixty megabytes of
# small values take ten seconds to create and free, and the front end answers no other request
# meanwhile.
MAX_VALUES_BYTES = 1 << 20
# The byte order mark that PowerShell and .NET write before UTF-8. RFC 8259 lets readers skip it.
MARK = b"\xef\xbb\xbf"


class BodyOutline(msgspec.Struct):
    """The fields of a body that are looked at before its schema reads it.

    They are not decoded, so a long prompt costs little time.
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
        """Whether the body has the field, and it is not null."""
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

    `ignored` has a line for the log for each field without effect, at most MAX_IGNORED.
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
    """Return a body, or a line of one, without a byte order mark at its beginning.

    Whatever decodes JSON of a client calls this first.
    """
    return body.removeprefix(MARK)


def check_values(body: bytes, max_texts: int = 0) -> None:
    """Raise MalformedRequest if a body has over MAX_VALUES_BYTES without its prompt: a text, or a
    list of at most `max_texts` texts.
    """

    def num_prompt_bytes(body: bytes) -> int:
        outline = msgspec.json.decode(body, type=BodyOutline)
        num_bytes = 0
        for prompt in (outline.inputs, outline.text_input, outline.prompt, outline.input):
            num_bytes = max(num_bytes, _num_text_bytes(bytes(prompt), max_texts))

        return num_bytes

    check_size(body, num_prompt_bytes, "an object", "the prompt's text")


def check_size(body: bytes, num_text_bytes: Callable[[bytes], int], kind: str, texts: str) -> None:
    """Raise MalformedRequest if a body has over MAX_VALUES_BYTES without its texts, whose bytes
    `num_text_bytes` counts, or if it is not JSON.

    The error names the body's `kind` and the `texts`.
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
    """Return the bytes of a prompt if it is a text or a list of at most `max_texts`, else 0."""
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
