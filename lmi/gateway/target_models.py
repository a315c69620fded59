"""TargetModel: the models of multi-model endpoints, which are stored for their containers and
loaded there.

When a container has no room for a further model (507), the least recently used one that serves no
request is unloaded, again until the new one fits. Source: SageMaker's guide, "Custom containers
contract for multi-model endpoints".
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from lmi.errors import StartError, cause_line
from lmi.gateway.container import ContainerFault
from lmi.gateway.endpoints import ANY, AwsEndpoint, CalledContainer
from lmi.gateway.errors import AwsError, invalid, model_error
from lmi.gateway.stores import S3_SCHEME
from lmi.gateway.threads import run_in_thread
from lmi.http.exchange import Header
from lmi.sources.archive import unpack
from lmi.sources.fetch import fetch
from lmi.sources.fetches import Place, WantedSource
from lmi.sources.job import FetchJob
from lmi.sources.source import ARCHIVE_SUFFIXES, descended

# Beyond the container's own limit, model_loading_timeout.
LOAD_TIMEOUT_S = 3600.0
# As on the platform.
UNLOAD_TIMEOUT_S = 360.0
ASK_TIMEOUT_S = 10.0
OK = 200
CONFLICT = 409
NO_ROOM = 507
NAME_CHARS = 32
# The names that the gateway gives.
NAME_OF_GATEWAY = re.compile(f"[0-9a-f]{{{NAME_CHARS}}}")
READY = "READY"

log = logging.getLogger(__name__)
T = TypeVar("T")


class LoadFailed(Exception):
    """A model cannot be stored or loaded. `status` is that of the container's response, or 0."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(f"{status}: {reason}" if status else reason)
        self.reason = reason
        self.status = status


class ModelStore:
    """The models of `source`, a folder or `s3://BUCKET/PREFIX`, in `folder`, which the container
    sees too.

    The one at SOURCE/KEY, a folder or an archive, is stored at `H/model`, where H is a hash of its
    place, because a key comes from clients and must not become a path. A stamp beside it says from
    which files it was made. What comes from S3 is kept in `sources`. Errors call a model `label`.
    """

    def __init__(self, source: str, folder: Path, label: str = "TargetModel") -> None:
        self._folder = folder
        self._label = label
        self._is_remote = source.startswith(S3_SCHEME)
        self._source = source.rstrip("/") if self._is_remote else str(Path(source).resolve())

    def name(self, key: str) -> str:
        """Return the name that the model has in the container. Raises AwsError for a key against
        the rule.
        """
        # S3 does not have other spellings of a key either.
        if not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise invalid(
                f"{self._label} must be a relative path without empty parts, . and .., given {key}"
            )

        digest = hashlib.sha256(f"{self._source}/{key}".encode()).hexdigest()
        return digest[:NAME_CHARS]

    def add(self, key: str) -> tuple[Path, bool]:
        """Store a model, unless it is there. Returns its folder, and whether the container may have
        other files of it.

        Raises AwsError if the source has no such model, or LoadFailed. It blocks.
        """
        home = self._folder / self.name(key)
        place = Place(self._folder, "--models-dir", key)
        try:
            if self._is_remote:
                source = f"{self._source}/{key}"
                download_dir = str(self._folder / "sources")
                wanted = WantedSource(source=source, download_dir=download_dir, takes_all=True)
                files = fetch(FetchJob(wanted))
            else:
                files = self._find(key)

            # Two gateways may have one folder.
            with place.only_one(home / "lock"):
                was_replaced = _update(files, home, place.check_room)

            return home / "model", was_replaced
        except StartError as error:
            raise LoadFailed(f"{self._label} {key}: {error}") from error
        except OSError as error:
            raise LoadFailed(
                f"{self._label} {key} cannot be stored in {home}: {cause_line(error)}"
            ) from error

    def _find(self, key: str) -> Path:
        """Return the folder or archive. A link that leads out of the source counts as nothing."""
        source = Path(self._source)
        files = (source / key).resolve()
        if not files.is_relative_to(source) or not files.exists():
            raise invalid(f"{self._label} {key} is not below {source}")

        if not files.is_dir() and not files.name.endswith(ARCHIVE_SUFFIXES):
            raise invalid(
                f"{self._label} {key} is neither a folder nor one of {' '.join(ARCHIVE_SUFFIXES)}"
            )

        link = _link_out_of(source, files)
        if link is not None:
            raise LoadFailed(
                f"{self._label} {key}: the link {link.relative_to(files)} leads out of the source"
            )

        return files


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
            folder, was_replaced = await run_in_thread(store.add, key)
            if was_replaced:
                # The container may have loaded the files that were there.
                await self._unload(name)

            log.info("loading model %s (TargetModel %s)", name, key)
            status, body = await self._register(name, str(folder))
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
            idle = await self._idle() if status == NO_ROOM else []
            while idle and status == NO_ROOM:
                idle_name = idle.pop(0)
                # It may serve a request or be loaded by now.
                if idle_name in self._num_requests or idle_name in self._loads:
                    continue

                # Requests for this model wait, and then load it again.
                self._unloads[idle_name] = asyncio.create_task(self._unload(idle_name))
                try:
                    await self._unloads[idle_name]
                finally:
                    del self._unloads[idle_name]

                status, body = await register()

        return status, body

    async def _idle(self) -> list[str]:
        """Return the loaded models of the gateway, the least recently used first."""
        answer = await self._get("/models?limit=100", _ListedModels) or _ListedModels()
        names = []
        for model in answer.models:
            if NAME_OF_GATEWAY.fullmatch(model.model_name):
                names.append(model.model_name)

        return sorted(names, key=lambda name: self._last_used_s.get(name, 0.0))

    async def _unload(self, name: str) -> None:
        log.info("unloading model %s", name)
        status, body = await self._ask("DELETE", f"/models/{name}", timeout_s=UNLOAD_TIMEOUT_S)
        if status not in (OK, 404):
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


def _link_out_of(source: Path, files: Path) -> Path | None:
    """Return a link in a model's folder, or in a folder that it links to, that leads out of the
    source, if any does.
    """
    visited: set[str] = set()
    for parent, folder_names, file_names in os.walk(files, followlinks=True):
        real_parent = os.path.realpath(parent)
        if real_parent in visited:
            folder_names.clear()
            continue

        visited.add(real_parent)
        for name in (*folder_names, *file_names):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(source):
                return path

    return None


def _update(files: Path, home: Path, check_room: Callable[[int], None]) -> bool:
    """Make the model, unless it is there as it should be. Returns whether other files were there
    before.
    """
    stamp = home / "stamp.json"
    model = home / "model"
    stamp_text = json.dumps(_stamps(files))
    if model.is_dir() and stamp.is_file() and stamp.read_text() == stamp_text:
        return False

    part = home / "part"
    # A process that was killed may have left it.
    shutil.rmtree(part, ignore_errors=True)
    try:
        if files.is_dir():
            new_model = shutil.copytree(files, part, copy_function=_link_or_copy)
        else:
            part.mkdir()
            unpack(files, part, check_room=check_room)
            new_model = descended(part)

        stamp.unlink(missing_ok=True)
        is_new = not model.exists()
        shutil.rmtree(model, ignore_errors=True)
        new_model.rename(model)
        stamp.write_text(stamp_text)
    finally:
        shutil.rmtree(part, ignore_errors=True)

    return not is_new


def _stamps(files: Path) -> list[tuple[str, int, int]]:
    """Return the path, size and time of change of each file of a folder, or of an archive."""
    paths = [files]
    if files.is_dir():
        paths = sorted(path for path in files.rglob("*") if path.is_file())

    stamps = []
    for path in paths:
        status = path.stat()
        stamps.append((str(path), status.st_size, status.st_mtime_ns))

    return stamps


def _link_or_copy(source: str, target: str) -> None:
    """Give a file a second name, which needs no room, or copy it to another disk."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
