"""The messages between a front end and an engine, as msgpack of typed structs. Any other frame
closes the connection.

A front end sends Submit, Cancel and AskStatus, and an empty frame, LOOK, when the folder of
adapters has changed. An engine sends Ready first, and again when its adapters have changed, and
after each step Responses, with all those of one front end. It answers an AskStatus of a request
that it has with a RequestStatus. An engine that starts again has new connections, so no message of
its predecessor can arrive.
"""

from collections.abc import Callable

import msgspec

from lmi.errors import ErrorInfo, InvalidRequest, LmiError, Unavailable
from lmi.executor import EngineInfo, Request, Response
from lmi.types import Origin, WaitStatus


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    # Chosen by the front end, unique on its connection.
    request_id: int
    request: Request
    origin: Origin = Origin()


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    request_id: int
    # Its client has left, or the time for the request is over.
    has_left: bool = False


class AskStatus(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """A stream has waited for long: its front end asks how far it is."""

    request_id: int


class AdapterOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of an entry in the folder of adapters. Without an error the engine has the
    adapter.
    """

    # That of the entry.
    stamp: int
    error: ErrorInfo | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    info: EngineInfo
    # What became of each adapter, by its name.
    outcomes: dict[str, AdapterOutcome] = {}


class Responses(msgspec.Struct, frozen=True, tag="responses", array_like=True):
    """The new Responses of one step; their `request_id` is the front end's."""

    responses: list[Response]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The queue or the executor did not accept a request."""

    request_id: int
    error: ErrorInfo


class RequestStatus(msgspec.Struct, frozen=True, tag="status", array_like=True):
    request_id: int
    status: WaitStatus


LOOK = b""
ToEngine = Submit | Cancel | AskStatus
ToFrontEnd = Ready | Responses | Refused | RequestStatus

encode: Callable[[ToEngine | ToFrontEnd], bytes] = msgspec.msgpack.Encoder().encode
# These raise msgspec.DecodeError or ValidationError for any other bytes.
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front_end: Callable[[bytes], ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd).decode


def refusal(error: Exception) -> ErrorInfo:
    """Return an error for the client. A ValueError of the executor is a wrong request, any other
    error its fault.
    """
    if isinstance(error, LmiError):
        return error.info

    kind = InvalidRequest if isinstance(error, ValueError) else Unavailable
    return kind(str(error)).info
