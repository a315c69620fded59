"""Routes of a model that is user code: `handle` gets the whole request, and its Output is the
response.

They replace every other inference route. An error is a JSON object with the reference's three keys.
An exception in `handle` has status 424.
"""

from contextlib import aclosing, closing
from functools import partial

import orjson

from lmi.apis.base.errors import error_headers
from lmi.apis.base.media_types import JSON
from lmi.apis.lmi.api import LMI
from lmi.errors import LmiError
from lmi.http.exchange import Exchange
from lmi.server.answer_body import as_ascii
from lmi.server.routes import invocations as of_engines
from lmi.server.service import Service
from lmi.user_code.calls import Call, Handle
from lmi.user_code.properties import properties_of


async def invocations(exchange: Exchange, service: Service) -> None:
    """Answer `/invocations`, and the paths that name the model too."""
    path_params = exchange.scope["path_params"]
    if "model" in path_params:
        service.check_model(path_params["model"], path_params.get("version"))

    exchange.refuse = partial(refuse, exchange, service)
    service.check_room()
    max_size = service.config.server.max_request_size
    body = await exchange.body(max_size, service.front_end.body_memory)

    with service.admitted():
        call = Handle(properties_of(exchange), exchange.query, body)
        del body
        await exchange.run_while_there(call_handler(exchange, service, [call]))


async def refuse(exchange: Exchange, service: Service, error: LmiError) -> None:
    rendered = LMI.errors.render(error, LMI.default_format(service.config.model), accepted=False)
    body = error_body(error, rendered.status)
    await exchange.send_whole(rendered.status, JSON, body, rendered.headers.items())


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
        exchange.note_failure(error.status, error_headers(error).items())
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

        media_type = head.media_type.lower()
        is_json = "json" in media_type
        is_text = media_type.startswith("text/") or is_json
        headers = {"cache-control": "no-cache"} | head.headers

        chunk = await anext(chunks, None)
        await exchange.start(head.status, head.media_type, headers.items())
        while chunk is not None:
            await exchange.write(as_ascii(chunk) if is_ascii and is_json else chunk)
            chunk = await anext(chunks, None)

        await exchange.end(exchange.line_end() if is_text else b"")


def error_body(error: LmiError, code: int) -> bytes:
    content = {"code": code, "message": "invoke handler failure", "error": str(error)}
    return orjson.dumps(content) + b"\n"


ROUTES = [(path, methods, invocations) for path, methods, _ in of_engines.ROUTES]
