"""The models that a container has loaded for the gateway, by its routes below /models.

The container is asked what it has, because it may have been restarted since. When it has no room for a further model
(507), the least recently used one that serves no request is unloaded, again until the new one fits. So do SageMaker's
multi-model endpoints. Source: SageMaker's guide, "Custom containers contract for multi-model endpoints".
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from lmi.gateway.container import Container
from lmi.gateway.library import Library
from lmi.gateway.threads import run_in_thread

LOAD_TIMEOUT_S = 3600.0  # beyond the container's own, model_loading_timeout
UNLOAD_TIMEOUT_S = 360.0  # as on the platform
ASK_TIMEOUT_S = 10.0
OK, CONFLICT, NO_ROOM = 200, 409, 507
OURS = re.compile("[0-9a-f]{32}")  # names that the gateway gives
READY = "READY"

log = logging.getLogger(__name__)
T = TypeVar("T")


class Refused(Exception):
    """The container did not load a model. `status` and `body` are its answer."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class _Described(msgspec.Struct, rename="camel"):
    status: str = READY  # other servers with this contract give none


class _Named(msgspec.Struct, rename="camel"):
    model_name: str


class _List(msgspec.Struct):
    models: list[_Named]


class Shelf:
    """The models of one container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._num_requests: Counter[str] = Counter()
        self._last_used_s: dict[str, float] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._unloads: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Lock()  # whoever holds it may unload models to make room

    @asynccontextmanager
    async def lease(self, library: Library, key: str) -> AsyncIterator[str]:
        """Yield the name of a model that is loaded and stays so in the block.

        A caller that leaves does not end a load. Raises NoSuchModel, ModelBroken, Refused or ContainerFault.
        """
        name = library.name(key)
        self._num_requests[name] += 1
        try:
            if name in self._unloads:
                await asyncio.wait([self._unloads[name]])
            if not await self._is_ready(name):
                await asyncio.shield(self._load_once(name, library, key))
            yield name
            self._last_used_s[name] = time.monotonic()
        finally:
            self._num_requests -= Counter([name])

    async def close(self) -> None:
        """End all loads. The container may go on with its own."""
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    def _load_once(self, name: str, library: Library, key: str) -> asyncio.Task[None]:
        """Return the one task that loads a model."""
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._load(name, library, key))
            self._loads[name].add_done_callback(lambda task: self._has_loaded(name, key, task))
        return self._loads[name]

    def _has_loaded(self, name: str, key: str, task: asyncio.Task[None]) -> None:
        del self._loads[name]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:  # its callers may have left
            log.warning("model %s (TargetModel %s) was not loaded: %s", name, key, error)
        else:
            self._last_used_s[name] = time.monotonic()

    async def _load(self, name: str, library: Library, key: str) -> None:
        laid = await run_in_thread(library.lay, key)
        if laid.was_replaced:  # the container may have loaded the files that were there
            await self._unload(name)
        log.info("loading model %s (TargetModel %s)", name, key)
        status, body = await self._register(name, str(laid.folder))
        if status == NO_ROOM:
            status, body = await self._register_with_room(name, str(laid.folder))
        if status not in (OK, CONFLICT):
            raise Refused(status, body.decode(errors="replace"))

    async def _register_with_room(self, name: str, url: str) -> tuple[int, bytes]:
        """Register a model, and unload others until it fits or none is left to unload."""
        async with self._room:
            answer = await self._register(name, url)
            for other in await self._idle() if answer[0] == NO_ROOM else []:
                if other in self._num_requests or other in self._loads:  # by now
                    continue
                await self._evict(other)
                answer = await self._register(name, url)
                if answer[0] != NO_ROOM:
                    break
            return answer

    async def _idle(self) -> list[str]:
        """Return the loaded models of the gateway that serve no request, the least recently used first."""
        listed = _decoded(await self._ask("GET", "/models?limit=100"), _List) or _List([])
        names = [model.model_name for model in listed.models if OURS.fullmatch(model.model_name)]
        return sorted(names, key=lambda name: self._last_used_s.get(name, 0.0))

    async def _evict(self, name: str) -> None:
        """Unload a model. Requests for it wait, and then load it again."""
        self._unloads[name] = asyncio.create_task(self._unload(name))
        try:
            await self._unloads[name]
        finally:
            del self._unloads[name]

    async def _is_ready(self, name: str) -> bool:
        found = _decoded(await self._ask("GET", f"/models/{name}"), _Described)
        return found is not None and found.status == READY

    async def _register(self, name: str, url: str) -> tuple[int, bytes]:
        return await self._ask("POST", "/models", {"model_name": name, "url": url}, LOAD_TIMEOUT_S)

    async def _unload(self, name: str) -> None:
        log.info("unloading model %s", name)
        status, body = await self._ask("DELETE", f"/models/{name}", timeout_s=UNLOAD_TIMEOUT_S)
        if status not in (OK, 404):
            log.warning("model %s was not unloaded: %d %s", name, status, body.decode(errors="replace"))

    async def _ask(
        self, method: str, path: str, document: dict[str, str] | None = None, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Return the status and the body of the container's answer. Raises ContainerFault."""
        headers = [("Content-Type", "application/json")] if document else []
        body = msgspec.json.encode(document) if document else b""
        async with self._container.call(method, path, headers, body, timeout_s) as answer:
            return answer.status, await answer.read()


def _decoded(answer: tuple[int, bytes], kind: type[T]) -> T | None:
    """Return what a successful answer says, or None for any other."""
    status, body = answer
    try:
        return msgspec.json.decode(body, type=kind) if status == OK else None
    except msgspec.MsgspecError:
        return None
