"""Routes of a model that is user code: `handle` gets the whole request, and its Output is the
response.

They replace every other inference route. An error is a JSON object with the reference's three keys.
An exception in `handle` has status 424.
"""

from contextlib import aclosing, closing
from functools import partial

import orjson

from lmi.apis.base.api import JSON, retry_header
from lmi.apis.lmi import LMI
from lmi.errors import LmiError
from lmi.http.exchange import Exchange
from lmi.server.respond import as_ascii
from lmi.server.routes import invocations as of_engines
from lmi.server.service import Service
from lmi.user_code.calls import Call, Handle
from lmi.user_code.formatter import properties


async def invocations(exchange: Exchange, service: Service) -> None:
    """Answer `/invocations`, and the paths that name the model too."""
    if "model" in (named := exchange.scope["path_params"]):
        service.check_model(named["model"], named.get("version"))

    exchange.refuse = partial(refuse, exchange, service)
    service.check_room()
    body = await exchange.body(
        service.config.server.max_request_size, service.front_end.body_memory
    )
    with service.admitted():
        call = Handle(properties(exchange), exchange.query, body)
        del body
        await exchange.run_while_there(call_handler(exchange, service, [call]))


async def refuse(exchange: Exchange, service: Service, error: LmiError) -> None:
    rendered = LMI.errors.render(error, LMI.default_format(service.config.model), accepted=False)
    await exchange.send_whole(
        rendered.status, JSON, error_body(error, rendered.status), rendered.headers.items()
    )


async def call_handler(exchange: Exchange, service: Service, calls: list[Handle]) -> None:
    """Make the one call of `handle`, which is taken out of `calls`, and send its response.

    Nothing else has the body then, which is in a frame. Raises LmiError only before the first byte
    is sent.
    """
    assert service.user_code is not None
    try:
        async with exchange.deadline(service.config.server.predict_timeout_s):
            with closing(await service.user_code.begin(calls.pop())) as call:
                await send_response(exchange, call, is_ascii=service.config.server.ascii_streams)
    except LmiError as error:
        if not exchange.status:
            raise

        exchange.error_label = error.label
        exchange.note_failure(error.status, retry_header(error).items())
        await exchange.end(exchange.line_end() + error_body(error, error.status))


async def send_response(exchange: Exchange, call: Call, *, is_ascii: bool) -> None:
    """Send the handler's response. With `is_ascii` a stream of JSON has only ASCII.

    A stream begins with its first chunk, so that an early failure has a real status. One of text
    ends with a newline, because client libraries that read lines wait forever for the end of one.
    """
    head = await call.head()
    async with aclosing(call.chunks()) as chunks:
        if not head.is_streaming:
            body = b"".join([chunk async for chunk in chunks])
            await exchange.send_whole(head.status, head.media_type, body, head.headers.items())
            return

        kind = head.media_type.lower()
        chunk = await anext(chunks, None)
        await exchange.start(
            head.status, head.media_type, ({"cache-control": "no-cache"} | head.headers).items()
        )
        while chunk is not None:
            await exchange.write(as_ascii(chunk) if is_ascii and "json" in kind else chunk)
            chunk = await anext(chunks, None)

        await exchange.end(
            exchange.line_end() if kind.startswith("text/") or "json" in kind else b""
        )


def error_body(error: LmiError, code: int) -> bytes:
    return (
        orjson.dumps({"code": code, "message": "invoke handler failure", "error": str(error)})
        + b"\n"
    )


ROUTES = [(path, methods, invocations) for path, methods, _ in of_engines.ROUTES]
