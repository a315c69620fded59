"""`/invocations`, and the same under a model's name: one path for the bodies of several doors.

`inputs` is of the LMI schema (with `option.rolling_batch=disable` of the dynamic-batch schema), `messages` and `prompt`
are of OpenAI's. `route=/v1/...` in X-Amzn-SageMaker-Custom-Attributes names another inference route instead, as AWS's
own containers read it: where a platform forwards this path alone, each door is still reached.

The path decides the framing, the body the schema: a chat that is streamed comes as lines here, as `inputs` do, unless
events are asked for, and a named route answers in its own framing. Every answer that is one JSON value ends with a
newline, since clients read these paths by lines.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from lmi.dialects import (
    DYNAMIC_BATCH,
    LMI,
    LMI_EVENTS,
    OPENAI_CHAT,
    OPENAI_CHAT_EVENTS,
    OPENAI_CHAT_LINES,
    OPENAI_COMPLETIONS,
    OPENAI_TEXT_EVENTS,
    OPENAI_TEXT_LINES,
    TGI_GENERATE,
    TGI_STREAM,
    Dialect,
)
from lmi.errors import LmiError, shorten
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.server.respond import answer
from lmi.server.service import Service
from lmi.settings.config import ModelConfig

BY_ROUTE = {
    "/v1/chat/completions": replace(OPENAI_CHAT, json_end=b"\n"),
    "/v1/completions": replace(OPENAI_COMPLETIONS, json_end=b"\n"),
    "/generate": replace(TGI_GENERATE, json_end=b"\n"),
    "/generate_stream": replace(TGI_STREAM, json_end=b"\n"),
}
BY_FIELD = {"messages": (OPENAI_CHAT_LINES, OPENAI_CHAT_EVENTS), "prompt": (OPENAI_TEXT_LINES, OPENAI_TEXT_EVENTS)}
"""The door of lines, and the one for a client whose Accept asks for events."""


class UnknownRoute(LmiError):
    """Custom-Attributes name a route that is no inference route of ours."""

    status = 404
    label = "unknown_route"


class _Body(msgspec.Struct):
    """Which fields there are; their values are only looked over."""

    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()

    def has(self, field: str) -> bool:
        return bytes(getattr(self, field)) not in (b"", b"null")


async def invocations(exchange: Exchange, service: Service) -> None:
    route = attribute(exchange.headers.get(CUSTOM_ATTRIBUTES, ""), "route")
    if route is not None:
        await answer(exchange, service, door_of_route(route))
    else:
        accept = exchange.headers.get("accept", "")
        usual = door_of_inputs(service.config.model, accept)
        await answer(exchange, service, usual, choose=partial(door_of_body, usual=usual, accept=accept))


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """`/predictions/{model}[/{version}]` and `/models/{model}/invoke`."""
    named = exchange.scope["path_params"]
    service.check_model(named["model"], named.get("version"))
    await invocations(exchange, service)


def attribute(attributes: str, name: str) -> str | None:
    """A value of `a=1; route=/v1/completions`; None where it is not there."""
    pairs = (pair.partition("=") for pair in attributes.split(";"))
    return next((value.strip() for key, _, value in pairs if key.strip() == name), None)


def door_of_route(route: str) -> Dialect:
    """Raises UnknownRoute."""
    if route not in BY_ROUTE:
        known = ", ".join(BY_ROUTE)
        raise UnknownRoute(f"route must be one of {known}, given {shorten(route)} ({CUSTOM_ATTRIBUTES})")
    return BY_ROUTE[route]


def door_of_inputs(model: ModelConfig, accept: str) -> Dialect:
    if model.dynamic_batch:
        return DYNAMIC_BATCH
    return LMI_EVENTS if accepts_events(accept) else LMI


def accepts_events(accept: str) -> bool:
    return "text/event-stream" in accept.lower()


def door_of_body(body: bytes, usual: Dialect, accept: str) -> Dialect:
    """The door whose field the body has, `inputs` before others; `usual` for anything that is no such object."""
    if not any(b'"%b"' % field.encode() in body for field in BY_FIELD):
        return usual
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return usual  # its schema says what is wrong
    if fields.has("inputs"):
        return usual
    doors = (doors[accepts_events(accept)] for field, doors in BY_FIELD.items() if fields.has(field))
    return next(doors, usual)


ROUTES = [
    ("/invocations", ["POST"], invocations),
    ("/predictions/{model}", ["POST"], invoke_model),
    ("/predictions/{model}/{version}", ["POST"], invoke_model),
    ("/models/{model}/invoke", ["POST"], invoke_model),
]
