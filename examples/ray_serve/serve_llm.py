"""lmi as an engine of `ray.serve.llm`, behind Ray's own OpenAI routes: `serve_llm:app` in place of
`serve_lmi:app` in docs/scale.md.

`ray.serve.llm` has the classes of its requests from vLLM, which has to be installed beside it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import orjson
from application import body_of, check_health, messages_of
from pydantic import BaseModel
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    EmbeddingResponse,
    ErrorInfo,
    ErrorResponse,
)
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve import Application
from ray.serve.llm import LLMConfig, LLMServer, build_openai_app

from lmi.embedded import embedded
from lmi.errors import Unsupported

# Ray adds it to every request.
NOT_OF_OPENAI = {"request_id"}


class LmiEngine(LLMEngine):
    """A model in the process of a replica. It takes and gives OpenAI's JSON."""

    def __init__(self, llm_config: LLMConfig) -> None:
        self._config = llm_config
        self._resources = AsyncExitStack()

    async def start(self) -> None:
        loading = self._config.model_loading_config
        options = {"option.model_name": loading.model_id, **self._config.engine_kwargs}
        source = loading.model_source or loading.model_id
        self._app = await self._resources.enter_async_context(embedded(source, options))

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def resolve_lora(self, lora_model: object) -> None:
        raise Unsupported("lora_config", "this example loads no adapters")

    async def reset_prefix_cache(self) -> None:
        raise Unsupported("reset_prefix_cache", "lmi frees what nobody uses by itself")

    async def chat(self, request: BaseModel, raw_request_info: object = None) -> AsyncIterator[Any]:
        async for part in self._answer("/v1/chat/completions", request, ChatCompletionResponse):
            yield part

    async def completions(
        self, request: BaseModel, raw_request_info: object = None
    ) -> AsyncIterator[Any]:
        async for part in self._answer("/v1/completions", request, CompletionResponse):
            yield part

    async def embeddings(
        self, request: BaseModel, raw_request_info: object = None
    ) -> AsyncIterator[Any]:
        async for part in self._answer("/v1/embeddings", request, EmbeddingResponse):
            yield part

    async def transcriptions(
        self, request: BaseModel, raw_request_info: object = None
    ) -> AsyncIterator[Any]:
        error = {"message": "lmi has no audio", "type": "unsupported", "code": 501}
        yield ErrorResponse(error=ErrorInfo(**error))

    async def check_health(self) -> None:
        """Raise RuntimeError if the model cannot answer. Ray then starts another replica."""
        await check_health(self._app)

    async def _answer(
        self, path: str, request: BaseModel, whole: type[BaseModel]
    ) -> AsyncIterator[Any]:
        """Yield the records of a stream as text, or one object: a `whole` answer, or an error."""
        body = request.model_dump_json(exclude_unset=True, exclude=NOT_OF_OPENAI).encode()
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        async with aclosing(messages_of(self._app, scope, body)) as answer:
            start, *further = await anext(answer)
            beginning = body_of(further)
            if b"content-length" in dict(start["headers"]):
                pieces = [body_of(messages) async for messages in answer]
                yield parsed(start["status"], beginning + b"".join(pieces), whole)
                return

            yield beginning.decode()
            async for messages in answer:
                yield body_of(messages).decode()


def parsed(status: int, text: bytes, whole: type[BaseModel]) -> BaseModel:
    """Return a whole answer, or the error in its place, as an object of Ray's."""
    if status == 200:
        return whole.model_validate_json(text)

    error = orjson.loads(text)["error"]
    return ErrorResponse(
        error=ErrorInfo(
            message=error["message"], type=error["type"], param=error["param"], code=status
        )
    )


class LmiServer(LLMServer):
    """Replicas of LmiEngine, for the `server_cls` of a LLMConfig."""

    _default_engine_cls = LmiEngine

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Return the options as they were given: vLLM's would ask for groups of GPUs."""
        return dict(llm_config.deployment_config)


def app(arguments: dict[str, str]) -> Application:
    """Build the application from the words of `serve run`: `model`, `replicas`, and options by
    their keys in serving.properties.
    """
    options = dict(arguments)
    model = options.pop("model", "demo")
    num_replicas = int(options.pop("replicas", "1"))
    config = LLMConfig(
        model_loading_config={"model_id": Path(model).name, "model_source": model},
        deployment_config={
            "num_replicas": num_replicas,
            "max_ongoing_requests": 1000,
            "ray_actor_options": {"num_cpus": 1},
        },
        engine_kwargs=options,
        server_cls=LmiServer,
    )
    return build_openai_app(
        {
            "llm_configs": [config],
            "ingress_deployment_config": {
                "num_replicas": 1,
                "autoscaling_config": None,
                "ray_actor_options": {
                    "num_cpus": 0,
                    "resources": {"node:__internal_head__": 0.001},
                },
            },
        }
    )
