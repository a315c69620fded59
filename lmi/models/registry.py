"""Loads and unloads one of several models on the whole server, as a front end is asked to.

A load is an entry in the folder of desired state, which is PENDING until the supervisor has the
model's processes ready and this front end has its tokenizer. A load that fails leaves nothing, but
where the processes failed and not for want of memory, the entry stays FAILED with the reason until
it is removed or loaded afresh.
"""

import asyncio
import logging
import os
from contextlib import suppress

from lmi import errors
from lmi.adapters.source import fetch
from lmi.errors import ErrorInfo, LmiError, StartError, from_info, shorten
from lmi.models.choice import SeveralModels, reason_for_client
from lmi.models.folder import Model
from lmi.models.followed import CANNOT_START, LOOK_S, until
from lmi.models.settings import need_bytes, resolve_model
from lmi.settings.config import Config
from lmi.settings.ports import choose_free_ports
from lmi.shared.desired_state import State, check_name, is_abandoned
from lmi.shared.machine import MB, free_bytes
from lmi.shared.state import Block, Phase
from lmi.sources.fetches import WantedSource

# SageMaker waits 360 s.
UNLOAD_S = 350.0
# For the processes of a load that failed.
GONE_S = 40.0
# For a process that makes a folder of a GGUF file.
OPENING_S = 120.0
# For others that wait for the same load and read why it failed.
NOTICE_S = 10 * LOOK_S

log = logging.getLogger(__name__)


class AlreadyLoading(Exception):
    """The same model is loading from the same place."""

    def __init__(self, entry: Model) -> None:
        super().__init__(entry)
        self.entry = entry


class NotOpened(Exception):
    """The model is a GGUF file, of which a process must make a folder first."""

    def __init__(self, source: WantedSource) -> None:
        super().__init__(source)
        self.source = source


class ModelRegistry:
    """The models of the server, as one front end changes them. The front ends agree through the
    folder.
    """

    def __init__(self, models: SeveralModels) -> None:
        self._models = models
        self._server = models.front_end.config
        self._folder = models.folder

    async def register(self, name: str, url: str) -> None:
        """Load a model, so that the next request for it is served by every front end.

        Raises InvalidRequest, Conflict, OutOfMemory, DeadlineExceeded or Unavailable with the
        cause.
        """
        check_name(name, "model_name")
        self._check_is_serving()
        while True:
            try:
                entry = await asyncio.to_thread(self._write_entry, name, url)
                break
            except NotOpened as error:
                await self._open(error.source)
            except AlreadyLoading as loading:
                if await self._is_loaded_by(loading.entry):
                    return

        try:
            await self._load(entry)
        except Exception as error:
            await self._give_up(entry, error)
            raise

    async def unregister(self, name: str) -> None:
        """Unload a model, and return when its processes have ended. Raises UnknownModel, or
        DeadlineExceeded.
        """
        self._check_is_serving()
        entry = await asyncio.to_thread(self._folder.remove, name)
        if entry is None or is_abandoned(entry):
            raise errors.UnknownModel(f"no model {shorten(name)} is loaded here")

        self._models.let_go()
        if not await self._until_gone(entry, UNLOAD_S):
            raise errors.DeadlineExceeded(
                f"the processes of the model {name!r} did not end within {UNLOAD_S:g} s"
            )

    def _write_entry(self, name: str, url: str) -> Model:
        """Write the entry of a model that has room. It reads files, so it runs on
        another thread.
        """
        try:
            resolved = resolve_model(name, url, self._server, os.environ)
            if resolved.request is not None:
                raise NotOpened(resolved.request.sources[0])

            need = need_bytes(resolved.config)
        except (StartError, OSError) as error:
            raise errors.InvalidRequest(reason_for_client(str(error), url)) from None

        def make(entries: list[Model]) -> Model:
            return self._new_entry(resolved.config, url, need, entries)

        entry = self._folder.register(name, make)
        for line in (*resolved.notes, *resolved.warnings):
            log.info("model %s: %s", name, line)

        return entry

    async def _open(self, source: WantedSource) -> None:
        """Let a process make the folder of a GGUF file, where the next look finds it."""
        front_end = self._models.front_end
        await fetch(
            source,
            OPENING_S,
            front_end.runtime.fetches(),
            front_end.block,
            field="url",
        )

    def _new_entry(self, config: Config, url: str, need: int, entries: list[Model]) -> Model:
        """Return the entry of a new model, whose folder it makes. Raises LmiError if the entry may
        not be written.
        """
        name = config.model.name
        living = []
        for entry in entries:
            state = self._models.status(entry).state
            if state is State.FAILED:
                continue

            if entry.name == name and state is State.PENDING and entry.url == url:
                raise AlreadyLoading(entry)

            if entry.name == name:
                raise errors.Conflict(f"the model {name!r} is {state.upper()} from {entry.url}")

            living.append(entry)

        self._check_room(need, living)
        try:
            config = choose_free_ports(config, self._ports_in_use(living))
            runtime = self._folder.add_folder(config)
        except (OSError, StartError) as error:
            raise errors.OutOfMemory(
                f"no room for the files of the model's processes: {error}"
            ) from None

        return Model(
            name=name, state=State.PENDING, folder=runtime.path.name, url=url, need_bytes=need
        )

    def _ports_in_use(self, entries: list[Model]) -> set[int]:
        """Return the ports of the other models' engines and of the gateway."""
        ports = {self._server.gateway_port or 0}
        for entry in entries:
            # An OSError: it has just been removed.
            with suppress(OSError):
                ports.update(self._folder.runtime_of(entry).config.engine.ports)

        return ports

    def _check_room(self, need: int, entries: list[Model]) -> None:
        """Raise OutOfMemory unless there is room for one more model."""
        max_models = self._server.max_models
        if len(entries) >= max_models:
            raise errors.OutOfMemory(
                f"{len(entries)} models are loaded, and max_models is {max_models}"
            )

        reserved_mb = self._server.reserved_memory_mb
        promised = sum(entry.need_bytes for entry in entries if entry.state is State.PENDING)
        free = free_bytes() - promised
        if free - need < reserved_mb * MB:
            raise errors.OutOfMemory(
                f"the model needs {need // MB} MB of memory (required_memory_mb, or an estimate): "
                f"{max(0, free) // MB} MB are free, of which {reserved_mb} MB (reserved_memory_mb) "
                "stay free"
            )

    async def _load(self, entry: Model) -> None:
        """Wait until the model can be used. Its tokenizer is loaded while its engines load."""
        try:
            timeout_s = self._folder.runtime_of(entry).config.engine.model_loading_timeout_s
        except OSError:
            raise self._gone(entry) from None

        try:
            async with asyncio.timeout(timeout_s):
                await self._models.here(entry)
                await self._until_ready(entry)
        except StartError as error:
            raise errors.InvalidRequest(reason_for_client(str(error), entry.url)) from None
        except (errors.UnknownModel, FileNotFoundError):
            raise self._gone(entry) from None
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"not loaded within model_loading_timeout ({timeout_s:g} s)"
            ) from None

        if not await asyncio.to_thread(self._folder.settle, entry, State.READY):
            raise self._gone(entry)

    async def _until_ready(self, entry: Model) -> None:
        """Wait for the model's processes. Raises the LmiError that says why they will
        not be ready.
        """
        block = self._models.block(entry)
        while block.supervisor.phase != Phase.READY:
            if block.supervisor.phase == Phase.FAILED:
                reason = reason_for_client(block.supervisor.reason, entry.url)
                if _lacked_memory(block):
                    raise errors.OutOfMemory(reason)

                raise errors.InvalidRequest(reason)

            self._check_is_serving()
            if not self._folder.holds(entry) or not self._folder.has_folder(entry):
                raise self._gone(entry)

            await asyncio.sleep(LOOK_S)

    def _gone(self, entry: Model) -> LmiError:
        """Return why the folder of a model's processes is gone: the model was unloaded, or they did
        not start.
        """
        if not self._folder.holds(entry):
            return errors.Conflict(f"the model {entry.name!r} was unloaded while it loaded")

        return errors.Unavailable(CANNOT_START)

    async def _give_up(self, entry: Model, error: Exception) -> None:
        """End the processes of a load that failed, and leave nothing of it but a fault of the
        model's processes.
        """
        log.error("model %s was not loaded: %s", entry.name, error)
        has_failed = self._models.status(entry).state is State.FAILED
        is_fault = isinstance(error, errors.InvalidRequest) and has_failed
        cause = error.label if isinstance(error, LmiError) else LmiError.label
        try:
            await asyncio.to_thread(self._folder.settle, entry, State.FAILED, str(error), cause)
        except OSError:
            # A full disk: an entry can still be removed.
            await asyncio.to_thread(self._folder.withdraw, entry)

        self._models.let_go()
        await self._until_gone(entry, GONE_S)
        if not is_fault:
            await asyncio.sleep(NOTICE_S)
            await asyncio.to_thread(self._folder.withdraw, entry)

    async def _until_gone(self, entry: Model, timeout_s: float) -> bool:
        """Wait until the supervisor has ended the processes of a model, which it always does when
        the server stops.
        """
        front_end = self._models.front_end

        def is_gone() -> bool:
            return not self._folder.has_folder(entry) or front_end.is_draining

        return await until(is_gone, timeout_s)

    def _check_is_serving(self) -> None:
        if self._models.front_end.is_draining:
            raise errors.Draining("the server is shutting down, it loads and unloads no model")

    async def _is_loaded_by(self, entry: Model) -> bool:
        """Wait for a load that another request began, and raise what it raises. False: its front
        end died.
        """
        current = self._folder.read(entry.name)
        while current is not None and current.folder == entry.folder:
            if current.state is State.READY:
                return True

            if current.state is State.FAILED:
                raise from_info(ErrorInfo(current.cause, current.reason))

            if is_abandoned(current):
                return False

            await asyncio.sleep(LOOK_S)
            current = self._folder.read(entry.name)

        if is_abandoned(entry):
            return False

        raise self._gone(entry)


def _lacked_memory(block: Block) -> bool:
    """Return whether a process of a model failed for want of memory."""
    for record in (*block.engines, *block.formatters):
        if record.phase == Phase.FAILED and record.cause == errors.NoMemory.label:
            return True

    return False
