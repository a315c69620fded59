"""lmi on Ray Serve: engines on the nodes of a cluster, and a door that passes requests on to them.
docs/scale.md has the commands.

Each replica of `Engine` has a model in its process, and every route of `lmi serve`. `Door` runs on
the head node. If an engine is lost before a byte of its answer was sent, another one gets the
request, once. A stream that had begun ends with an error in the words of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress

import ray
from application import Message, body_of, check_health, messages_of
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

    async def answer(self, scope: Message, body: bytes) -> AsyncIterator[list[Message]]:
        """Yield where the request was accepted, then what the application sends.

        Ray cancels it when the client leaves. The engine then drops the request.
        """
        yield [{"type": "accepted", "node": ray.util.get_node_ip_address()}]
        async with aclosing(messages_of(self._app, scope, body)) as lists:
            async for messages in lists:
                yield messages

    async def check_health(self) -> None:
        """Raise RuntimeError if the model cannot answer. Ray then starts another replica."""
        await check_health(self._app)


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
        answer = self._engines.remote(scope, body)
        try:
            async with asyncio.timeout(ACCEPT_S):
                [accepted] = await anext(answer)

            start, *further = await anext(answer)
            beginning = body_of(further)
            headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
            headers[NODE] = accepted["node"]
            # Ray has named the request, and answers with that.
            headers.pop("x-request-id", None)
            if "content-length" in headers:
                pieces = [body_of(messages) async for messages in answer]
                whole = beginning + b"".join(pieces)
                return Response(whole, start["status"], headers)
        except TimeoutError:
            answer.cancel()
            raise Unavailable(f"no engine accepted the request within {ACCEPT_S:g} s") from None
        except RayActorError:
            raise EngineLost(LOST) from None

        records = passed_on(scope["path"], beginning, answer)
        return StreamingResponse(records, start["status"], headers)


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises RequestTooLarge."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestTooLarge(f"the request body must have at most {MAX_BODY_BYTES} bytes")

    return bytes(body)


async def passed_on(
    path: str, beginning: bytes, answer: DeploymentResponseGenerator
) -> AsyncIterator[bytes]:
    """Yield the records of a stream, and where its engine is lost the error as the last one."""
    yield beginning
    try:
        async for messages in answer:
            yield body_of(messages)
    except RayActorError:
        api = api_at(path, ANY_MODEL)
        format = api.default_format(ANY_MODEL)
        yield api.errors.render(EngineLost(LOST), format, accepted=True).body
    finally:
        # The client may have left.
        answer.cancel()


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
