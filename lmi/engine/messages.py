"""The messages between a front end and an engine.

A front end sends Submit, Cancel, LoadAdapter and UnloadAdapter. An engine sends Ready first, and again when its
adapters have changed. It sends Refused for a request that it does not accept or an adapter that it cannot change, and
Done for an adapter that it has changed. After each step it sends Responses, with all those of one front end. The front
end chooses the ids of its requests, unique on its connection; `Response.request_id` on the socket is such an id. An
engine that starts again has new connections, so no message of its predecessor can arrive. Messages are encoded as
msgpack of typed structs. Any other frame closes the connection.
"""

from __future__ import annotations

import msgspec

from lmi.errors import ErrorInfo
from lmi.executor import EngineInfo, Request, Response


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    request_id: int  # chosen by the front end, unique on its connection
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    request_id: int


class AdapterSettings(msgspec.Struct, frozen=True, array_like=True):
    """How an engine loads an adapter, as in `Executor.load_adapter`."""

    path: str
    is_pinned: bool = False
    preload: bool = True


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """The engine answers Done or Refused, as to UnloadAdapter. Its request ids and those of Submit are one series."""

    request_id: int
    name: str
    settings: AdapterSettings


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    request_id: int
    name: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """`failed_adapters` has the reason for each registered adapter that this engine could not load by itself."""

    info: EngineInfo
    failed_adapters: dict[str, str] = {}


class Responses(msgspec.Struct, frozen=True, tag="responses", array_like=True):
    """The new Responses of one step; their `request_id` is the front end's."""

    responses: list[Response]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The executor did not accept a request or did not change an adapter."""

    request_id: int
    error: ErrorInfo


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The executor has changed the adapter as LoadAdapter or UnloadAdapter asked."""

    request_id: int


ToEngine = Submit | Cancel | LoadAdapter | UnloadAdapter
ToFrontEnd = Ready | Responses | Refused | Done

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front_end: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)


def encode(message: ToEngine | ToFrontEnd) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """Decode a message. Raises msgspec.DecodeError or ValidationError for any other bytes."""
    return _to_engine.decode(frame)


def decode_to_front_end(frame: bytes | memoryview) -> ToFrontEnd:
    return _to_front_end.decode(frame)
