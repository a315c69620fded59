"""The API of a model that is code of its own: a request goes to `handle` whole, its Output comes back as it is.

Takes the place of every other inference route. What goes wrong is answered with the reference's three keys,
424 for what `handle` raises.
"""

from __future__ import annotations

from contextlib import aclosing, closing

import orjson

from lmi.apis import LMI
from lmi.errors import ClientGone, LmiError
from lmi.http.exchange import Exchange
from lmi.server.custom import JSON, pieces, properties, query
from lmi.server.service import Service
from lmi.user_code.client import Call
from lmi.user_code.messages import Handle, Head

STREAM_HEADERS = {"cache-control": "no-cache"}


async def invocations(exchange: Exchange, service: Service) -> None:
    try:
        service.check_room()
        body = await exchange.body(service.config.server.max_request_size, service.body_memory)
        with service.admitted():
            await exchange.run_while_there(hand_over(exchange, service, body))
    except ClientGone:
        raise
    except LmiError as error:
        exchange.error_label = error.label
        await answer_error(exchange, service, error)


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """`/predictions/{model}[/{version}]` and `/models/{model}/invoke`."""
    named = exchange.scope["path_params"]
    service.check_model(named["model"], named.get("version"))
    await invocations(exchange, service)


async def hand_over(exchange: Exchange, service: Service, body: bytes) -> None:
    """Raises LmiError as long as no byte was sent; later none."""
    assert service.code is not None
    given, asked = properties(exchange), query(exchange)
    try:
        async with exchange.deadline(service.config.server.predict_timeout_s):
            with closing(await service.code.begin(lambda call_id: Handle(call_id, given, asked, body))) as call:
                await copy(exchange, call)
    except LmiError as error:
        if not exchange.status:
            raise
        exchange.error_label = error.label
        await exchange.end(error_body(error, error.status))


async def copy(exchange: Exchange, call: Call) -> None:
    """The head is held back until the first piece exists, so that early failures have a real status."""
    head = await call.take()
    assert isinstance(head, Head)
    async with aclosing(pieces(call)) as messages:
        if not head.is_streaming:
            body = b"".join([piece.data async for piece in messages])
            await exchange.answer(head.status, head.media_type, body, head.headers.items())
            return
        async for piece in messages:
            if not exchange.status:
                await exchange.start(head.status, head.media_type, (STREAM_HEADERS | head.headers).items())
            await exchange.write(piece.data)
    if not exchange.status:
        await exchange.start(head.status, head.media_type, (STREAM_HEADERS | head.headers).items())
    await exchange.end()


async def answer_error(exchange: Exchange, service: Service, error: LmiError) -> None:
    """The statuses and headers of the LMI API, and one shape for whatever went wrong."""
    rendered = LMI.render_error(error, LMI.default_format(service.config.model), accepted=False)
    await exchange.answer(rendered.status, JSON, error_body(error, rendered.status), rendered.headers.items())


def error_body(error: LmiError, code: int) -> bytes:
    message = str(error).encode(errors="replace").decode()
    return orjson.dumps({"code": code, "message": "invoke handler failure", "error": message}) + b"\n"


ROUTES = [
    ("/invocations", ["POST"], invocations),
    ("/predictions/{model}", ["POST"], invoke_model),
    ("/predictions/{model}/{version}", ["POST"], invoke_model),
    ("/models/{model}/invoke", ["POST"], invoke_model),
]
