"""TargetModel: the models of multi-model endpoints, which their containers load and unload.

When a container has no room for a further model (507), the least recently used one that serves no
request is unloaded, again until the new one fits. Source: SageMaker's guide, "Custom containers
contract for multi-model endpoints".
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec

from lmi.gateway.aws_endpoint import AwsEndpoint, CalledContainer
from lmi.gateway.container import ContainerFault
from lmi.gateway.errors import AwsError, invalid, model_error
from lmi.gateway.model_store import NAME_CHARS, LoadFailed, ModelStore
from lmi.gateway.named_endpoints import ANY
from lmi.gateway.threads import run_in_thread
from lmi.http.exchange import Header

# Beyond the container's own limit, model_loading_timeout.
LOAD_TIMEOUT_S = 3600.0
# As on the platform.
UNLOAD_TIMEOUT_S = 360.0
ASK_TIMEOUT_S = 10.0
OK = 200
NOT_FOUND = 404
CONFLICT = 409
NO_ROOM = 507
# The names that the gateway gives.
NAME_OF_GATEWAY = re.compile(f"[0-9a-f]{{{NAME_CHARS}}}")
READY = "READY"
# The most models that a container is asked to list at once.
MAX_LISTED = 100

log = logging.getLogger(__name__)
T = TypeVar("T")


class TargetModels:
    """The models of all endpoints. `stores` has theirs by name, ANY stands for every other name.

    A client waits at most `timeout_s` for a model to be loaded. The load goes on.
    """

    def __init__(self, stores: Mapping[str, ModelStore], timeout_s: float) -> None:
        self._stores = stores
        self._timeout_s = timeout_s
        # By the URL of their container.
        self._loaded: dict[str, LoadedModels] = {}

    async def close(self) -> None:
        """End what loads and unloads models, at every container."""
        await asyncio.gather(*(loaded.close() for loaded in self._loaded.values()))

    @asynccontextmanager
    async def path(
        self, endpoint: AwsEndpoint, target: str | None, region: str
    ) -> AsyncIterator[str]:
        """Yield the container's path for a call, while the model that `target` names stays loaded.
        Raises AwsError.
        """
        store = self._stores.get(endpoint.name) or self._stores.get(ANY)
        if target is None:
            if store is not None:
                rule = "is a multi-model endpoint: TargetModel must name a model of it"
                raise invalid(f"Endpoint {endpoint.name} {rule}.")

            yield "/invocations"
            return

        if store is None:
            raise invalid(
                f"Endpoint {endpoint.name} is not a multi-model endpoint: --models names no source "
                f"for it."
            )

        container = endpoint.container
        loaded = self._loaded.setdefault(container.url, LoadedModels(container))
        name = store.name(target)
        with loaded.lease(name):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await loaded.load(name, store, target)
            except LoadFailed as error:
                raise model_error(error.status, error.reason, endpoint.name, region) from error
            except ContainerFault as fault:
                raise endpoint.error(fault, region) from fault
            except TimeoutError:
                not_ready = f"TargetModel {target} is still loading. Try again later."
                raise AwsError("ModelNotReadyException", 429, not_ready) from None

            yield f"/models/{name}/invoke"


class _ListedModel(msgspec.Struct, rename="camel"):
    model_name: str = ""
    # Other servers with this contract give none.
    status: str = READY


class _ListedModels(msgspec.Struct):
    models: list[_ListedModel] = []


class LoadedModels:
    """The models that one container has loaded for the gateway, by its routes below /models.

    The container is asked what it has, because it may have been restarted since.
    """

    def __init__(self, container: CalledContainer) -> None:
        self._container = container
        self._num_requests: Counter[str] = Counter()
        self._last_used_s: dict[str, float] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._unloads: dict[str, asyncio.Task[None]] = {}
        # Whoever holds it may unload models to make room.
        self._room = asyncio.Lock()

    @contextmanager
    def lease(self, name: str) -> Iterator[None]:
        """In the block the model is not unloaded."""
        self._num_requests[name] += 1
        try:
            yield
            self._last_used_s[name] = time.monotonic()
        finally:
            # Subtraction drops a name at 0, so that only models with requests are in the counter.
            self._num_requests -= Counter([name])

    async def load(self, name: str, store: ModelStore, key: str) -> None:
        """Return when a model is loaded. A caller that leaves does not end a load.

        Raises AwsError, LoadFailed or ContainerFault.
        """
        if name in self._unloads:
            await asyncio.wait([self._unloads[name]])

        loaded = await self._get(f"/models/{name}", _ListedModel)
        if loaded is None or loaded.status != READY:
            # One task loads a model.
            if name not in self._loads:
                self._loads[name] = asyncio.create_task(self._load(name, store, key))

            await asyncio.shield(self._loads[name])

    async def close(self) -> None:
        """End all loads. The container may go on with its own."""
        for task in self._loads.values():
            task.cancel()

        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    async def _load(self, name: str, store: ModelStore, key: str) -> None:
        try:
            stored = await run_in_thread(store.add, key)
            if stored.was_replaced:
                # The container may have loaded the files that were there.
                await self._unload(name)

            log.info("loading model %s (TargetModel %s)", name, key)
            status, body = await self._register(name, str(stored.folder))
            if status not in (OK, CONFLICT):
                raise LoadFailed(body.decode(errors="replace"), status)

            self._last_used_s[name] = time.monotonic()
        except Exception as error:
            # Its callers may have left, so it is logged here.
            log.warning("model %s (TargetModel %s) was not loaded: %s", name, key, error)
            raise
        finally:
            del self._loads[name]

    async def _register(self, name: str, url: str) -> tuple[int, bytes]:
        """Return the container's answer, after others were unloaded until the model fits or none is
        left to unload.
        """
        document = {"model_name": name, "url": url}
        register = partial(self._ask, "POST", "/models", document, LOAD_TIMEOUT_S)
        status, body = await register()
        if status != NO_ROOM:
            return status, body

        async with self._room:
            status, body = await register()
            if status != NO_ROOM:
                return status, body

            for loaded_name in await self._least_recently_used():
                # A model that serves a request or is being loaded stays.
                if loaded_name in self._num_requests or loaded_name in self._loads:
                    continue

                await self._make_way(loaded_name)
                status, body = await register()
                if status != NO_ROOM:
                    break

        return status, body

    async def _make_way(self, name: str) -> None:
        """Unload a model. Requests for it wait meanwhile, and then load it again."""
        self._unloads[name] = asyncio.create_task(self._unload(name))
        try:
            await self._unloads[name]
        finally:
            del self._unloads[name]

    async def _least_recently_used(self) -> list[str]:
        """Return the loaded models of the gateway, the least recently used first.

        Of a container with over MAX_LISTED models they are those of its first page.
        """
        path = f"/models?limit={MAX_LISTED}"
        answer = await self._get(path, _ListedModels) or _ListedModels()
        names = []
        for model in answer.models:
            if NAME_OF_GATEWAY.fullmatch(model.model_name):
                names.append(model.model_name)

        return sorted(names, key=lambda name: self._last_used_s.get(name, 0.0))

    async def _unload(self, name: str) -> None:
        log.info("unloading model %s", name)
        status, body = await self._ask("DELETE", f"/models/{name}", timeout_s=UNLOAD_TIMEOUT_S)
        if status not in (OK, NOT_FOUND):
            log.warning(
                "model %s was not unloaded: %d %s", name, status, body.decode(errors="replace")
            )

    async def _get(self, path: str, kind: type[T]) -> T | None:
        """Return what a successful answer says, or None for any other. Raises ContainerFault."""
        status, body = await self._ask("GET", path)
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(body, type=kind) if status == OK else None

        return None

    async def _ask(
        self,
        method: str,
        path: str,
        document: dict[str, str] | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> tuple[int, bytes]:
        """Return the status and the body of the container's response. Raises ContainerFault."""
        headers: list[Header] = []
        body = b""
        if document:
            headers.append(("Content-Type", "application/json"))
            body = msgspec.json.encode(document)

        with self._container.lease() as container:
            async with container.call(method, path, headers, body, timeout_s) as response:
                return response.status, await response.read()
