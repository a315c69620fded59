"""lmi on Ray Serve: engines on the nodes of a cluster, and a door that passes requests on to them.

    serve run --working-dir examples/ray_serve serve_lmi:app model=demo replicas=2

Each replica of `Engine` has a model in its process, and every route of `lmi serve`. `Door` runs on
the head node. If an engine is lost before a byte of its answer was sent, another one gets the
request, once. A stream that had begun ends with an error in the words of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lmi.apis.table import api_at
from lmi.embedded import embedded
from lmi.errors import EngineLost, LmiError, RequestTooLarge, Unavailable
from lmi.settings.config import ModelConfig

# A message of ASGI, or the scope of a request.
Message = dict[str, Any]

# What an engine is told of a request beside its body.
TOLD = ("type", "method", "path", "query_string", "headers", "client", "server", "scheme")
# The header of an answer that names the node whose engine gave it.
NODE = "x-lmi-node"
# As many are passed to an engine at once. Its own queue says who waits, and who is refused.
MAX_REQUESTS = 1000
MAX_BODY_BYTES = 64 << 20
# A request waits so long until an engine accepts it.
ACCEPT_S = 10.0
# Of whatever model: it decides the form of an error.
ANY_MODEL = ModelConfig(path="", name="model")
LOST = "the engine was lost while it worked on this request"


@serve.deployment(
    max_ongoing_requests=MAX_REQUESTS,
    health_check_period_s=1,
    health_check_timeout_s=5,
    ray_actor_options={"num_cpus": 1},
)
class Engine:
    """A model, in the process of a replica."""

    async def __init__(self, model: str, options: dict[str, str]) -> None:
        # They stay until the process ends.
        self._resources = AsyncExitStack()
        self._app = await self._resources.enter_async_context(embedded(model, options))

    async def answer(self, scope: Message, body: bytes) -> AsyncIterator[Message]:
        """Yield where the request was accepted, then what the application sends.

        Ray cancels it when the client leaves. The engine then drops the request.
        """
        yield {"type": "accepted", "node": ray.util.get_node_ip_address()}
        requests = [{"type": "http.request", "body": body}]
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            if not requests:
                await asyncio.Event().wait()

            return requests.pop()

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                messages.put_nowait(None)

        answering = asyncio.create_task(run())
        try:
            while message := await messages.get():
                yield message

            await answering
        finally:
            answering.cancel()

    async def check_health(self) -> None:
        """Raise RuntimeError if the model cannot answer. Ray then starts another replica."""
        scope = {"type": "http", "method": "GET", "path": "/ping", "headers": []}
        _, start, end = [message async for message in self.answer(scope, b"")]
        if start["status"] != 200:
            raise RuntimeError(f"/ping: {end['body'].decode()}")


@serve.deployment(
    max_ongoing_requests=MAX_REQUESTS,
    # The loss of another node leaves it alone.
    ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
)
class Door:
    """Passes each request on to an engine, and the answer back."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        scope = {name: request.scope[name] for name in TOLD if name in request.scope}
        try:
            body = await read_body(request)
            with suppress(EngineLost):
                return await self._ask(scope, body)

            return await self._ask(scope, body)
        except LmiError as error:
            return refusal(scope["path"], error)

    async def _ask(self, scope: Message, body: bytes) -> Response:
        """Return the answer of one engine.

        Raises EngineLost if it is lost before the first byte, Unavailable if none accepts the
        request.
        """
        messages = self._engines.remote(scope, body)
        try:
            async with asyncio.timeout(ACCEPT_S):
                accepted = await anext(messages)

            start = await anext(messages)
            headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
            headers[NODE] = accepted["node"]
            # Ray has named the request, and answers with that.
            headers.pop("x-request-id", None)
            if "content-length" in headers:
                whole = b"".join([message.get("body", b"") async for message in messages])
                return Response(whole, start["status"], headers)
        except TimeoutError:
            messages.cancel()
            raise Unavailable(f"no engine accepted the request within {ACCEPT_S:g} s") from None
        except RayActorError:
            raise EngineLost(LOST) from None

        records = passed_on(scope["path"], messages)
        return StreamingResponse(records, start["status"], headers)


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises RequestTooLarge."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestTooLarge(f"the request body must have at most {MAX_BODY_BYTES} bytes")

    return bytes(body)


async def passed_on(path: str, messages: DeploymentResponseGenerator) -> AsyncIterator[bytes]:
    """Yield the records of a stream, and where its engine is lost the error as the last one."""
    try:
        async for message in messages:
            yield message.get("body", b"")
    except RayActorError:
        api = api_at(path, ANY_MODEL)
        format = api.default_format(ANY_MODEL)
        yield api.errors.render(EngineLost(LOST), format, accepted=True).body
    finally:
        # The client may have left.
        messages.cancel()


def refusal(path: str, error: LmiError) -> Response:
    """Return an error as the whole answer, in the words of the path's API."""
    api = api_at(path, ANY_MODEL)
    rendered = api.errors.render(error, api.default_format(ANY_MODEL), accepted=False)
    body = api.whole(rendered.media_type, rendered.body)
    return Response(body, rendered.status, dict(rendered.headers), rendered.media_type)


def app(arguments: dict[str, str]) -> Application:
    """Build the application from the words of `serve run`: `model`, `replicas`, and options by
    their keys in serving.properties.
    """
    options = dict(arguments)
    model = options.pop("model", "demo")
    num_replicas = int(options.pop("replicas", "1"))
    engines = Engine.options(num_replicas=num_replicas).bind(model, options)
    return Door.bind(engines)
