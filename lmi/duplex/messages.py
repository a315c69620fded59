"""The messages of a client.

{"inputs": "Hello"}                                a body, as it is posted over HTTP
{"id": "a", "body": {"inputs": "Hello"}}           the same, beside others that run
{"id": "a", "body": …, "headers": {"accept": …}}   with headers of its own
{"id": "a", "cancel": true}                        an answer that is not wanted any more
"""

import re
from dataclasses import dataclass

import msgspec

from lmi.apis.base.body import LEFT_OUT, UNREADABLE, without_mark
from lmi.errors import InvalidParameter, LmiError

MAX_ID_CHARS = 128
# What a client itself may say of one request. Its keys, and what a proxy says of it, are those of
# the connection.
HEADERS = (
    "accept",
    "anthropic-version",
    "x-amzn-sagemaker-adapter-alias",
    "x-amzn-sagemaker-adapter-identifier",
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-inference-id",
    "x-amzn-sagemaker-session-id",
    "x-amzn-sagemaker-target-model",
    "x-request-id",
    "x-request-timeout",
)
HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,4096}")

Field = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class BodyMessage:
    """A message that is answered. `fault` says why it has no body."""

    body: bytes = b""
    # None for a message that is nothing but a body, "" where it cannot be read.
    id: str | None = None
    headers: tuple[Field, ...] = ()
    fault: LmiError | None = None


@dataclass(frozen=True, slots=True)
class CancelMessage:
    id: str


class MessageOutline(msgspec.Struct):
    """What makes a message more than a body. No API has `id` together with one of the others."""

    id: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()
    cancel: msgspec.Raw = msgspec.Raw()


class MessageEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    body: msgspec.Raw = msgspec.Raw()
    headers: dict[str, str] = {}
    cancel: bool = False


def read(message: bytes) -> BodyMessage | CancelMessage:
    """Return what a message means. What is no JSON is a body, whose API reports the fault."""
    if b'"id"' not in message:
        return BodyMessage(message)

    try:
        outline = msgspec.json.decode(without_mark(message), type=MessageOutline)
    except UNREADABLE:
        return BodyMessage(message)

    if outline.id in LEFT_OUT or (outline.body in LEFT_OUT and outline.cancel in LEFT_OUT):
        return BodyMessage(message)

    try:
        id = msgspec.json.decode(outline.id, type=str)
    except UNREADABLE:
        id = ""

    try:
        return _read_envelope(id, outline, message)
    except LmiError as fault:
        return BodyMessage(id=id, fault=fault)


def _read_envelope(id: str, outline: MessageOutline, message: bytes) -> BodyMessage | CancelMessage:
    if not 1 <= len(id) <= MAX_ID_CHARS:
        raise InvalidParameter(
            "id", f"a text of 1 to {MAX_ID_CHARS} characters", bytes(outline.id).decode()
        )

    try:
        envelope = msgspec.json.decode(without_mark(message), type=MessageEnvelope)
    except msgspec.ValidationError as error:
        rule = 'an object of "id" with "body" and perhaps "headers", or with "cancel": true'
        raise InvalidParameter("the message", rule, str(error)) from None

    if envelope.cancel:
        return CancelMessage(id)

    if envelope.body in LEFT_OUT:
        raise InvalidParameter("body", 'there, or "cancel" true', None)

    fields = []
    for name, value in envelope.headers.items():
        if name.lower() not in HEADERS:
            raise InvalidParameter("headers", f"among {', '.join(HEADERS)}", name)

        if not HEADER_VALUE.fullmatch(value):
            raise InvalidParameter(name, "at most 4096 printable ASCII characters", value)

        fields.append((name.lower().encode(), value.encode()))

    return BodyMessage(bytes(envelope.body), id, tuple(fields))
