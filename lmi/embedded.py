"""A whole server in the process of another one, which starts it, ends it, and passes requests to
it.

    async with embedded("path/to/model") as app:
        ...

`app` is an ASGI application with every route of `lmi serve path/to/model`. Its engine steps on a
thread of this process, and nobody supervises it: who embeds it asks `/ping`, and starts another
process where that fails, as it does for good once the engine has stopped by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lmi.engine import worker
from lmi.errors import BadConfiguration
from lmi.executor import Executor
from lmi.runtime import LoadReport, Runtime, ServerRuntime
from lmi.server.app import build_app
from lmi.server.front_end import FrontEnd
from lmi.server.service import Models
from lmi.sessions.cleaning import kept_clean
from lmi.settings.config import Config
from lmi.settings.handler import announced
from lmi.settings.resolve import Resolved, resolve_folder
from lmi.shared.state import EngineRecord, Phase, SupervisorRecord

# They count where the options say nothing else.
ONE_PROCESS = {"frontend_workers": "1", "maxWorkers": "1"}

log = logging.getLogger(__name__)


@asynccontextmanager
async def embedded(
    folder: str | None = None, options: Mapping[str, str] | None = None
) -> AsyncIterator[ASGIApp]:
    """Load a model, and serve it while the block runs.

    `folder` is what `lmi serve` is given, None for the demo, and `options` are those of
    serving.properties by their keys. The environment counts as it does there. Raises StartError:
    BadConfiguration also for what needs further processes, ModelUnusable for the model's files.
    """
    config = await asyncio.to_thread(settings_of, folder, options or {})
    server = ServerRuntime.create(config.server)
    try:
        model = server.add_model(config)
        server.show_model(model)
        supervisor = server.attach().supervisor
        supervisor.phase = Phase.READY
        async with _engine(model, supervisor), _application(server) as app:
            yield app
    finally:
        server.remove()


def settings_of(folder: str | None, options: Mapping[str, str]) -> Config:
    """Return the settings of an embedded server. Raises BadConfiguration with a line for each that
    it has no process for.
    """
    resolved = resolve_folder(folder, os.environ, {**ONE_PROCESS, **options})
    for line in resolved.warnings:
        log.warning("%s", line)

    faults = list(_beyond_one_process(resolved))
    if faults:
        raise BadConfiguration("\n".join(faults))

    return resolved.config


def _beyond_one_process(resolved: Resolved) -> Iterator[str]:
    """Yield what these settings ask for that needs a supervisor."""
    config = resolved.config
    if resolved.request is not None:
        for missing in resolved.request.sources:
            yield f"{missing.source} is not here: allowed is a local folder (lmi pull fetches it)"

    if config.user_code is not None or config.requirements is not None:
        yield f"{config.model.path} has code of its own, which only `lmi serve` runs"

    refused = {
        "multi_model": config.server.multi_model,
        "minWorkers": config.engine.num_engines > 1,
        "option.api_key_file": config.server.api_key_file is not None,
        "option.env": bool(config.engine.environ),
        "option.num_threads": config.engine.num_threads is not None,
    }
    for key, is_asked in refused.items():
        if is_asked:
            yield f"{key} has no effect in the process of another server: only `lmi serve` has it"


@asynccontextmanager
async def _engine(model: Runtime, supervisor: SupervisorRecord) -> AsyncIterator[None]:
    """Run the engine of a model on a thread while the block runs."""
    record = model.attach().engines[0]
    record.claim()
    executor, report = await _loaded(model, record)
    try:
        model.write_report(0, report)
        stopped = asyncio.Event()
        async with worker.serving(executor, record, model, 0, stopped):
            watch = asyncio.create_task(_note_stop(stopped, supervisor))
            try:
                yield
            finally:
                watch.cancel()
    finally:
        await asyncio.to_thread(executor.shutdown)


async def _loaded(model: Runtime, record: EngineRecord) -> tuple[Executor, LoadReport]:
    """Load the engine on a thread. If the caller is cancelled, the engine ends once it is there."""
    handler = announced()[model.config.engine.handler]
    load = asyncio.to_thread(worker.load, model, record, handler.load)
    loading = asyncio.create_task(load)
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        # No thread can be stopped, and the loop waits for it at its end anyway.
        with suppress(Exception):
            executor, _ = await loading
            await asyncio.to_thread(executor.shutdown)

        raise


async def _note_stop(stopped: asyncio.Event, supervisor: SupervisorRecord) -> None:
    """Say in the place of a supervisor that the engine has stopped by itself: none starts again."""
    await stopped.wait()
    supervisor.reason = "the engine has stopped by itself, the log says why"
    supervisor.phase = Phase.FAILED


@asynccontextmanager
async def _application(server: ServerRuntime) -> AsyncIterator[ASGIApp]:
    """Run the one front end, and yield its application."""
    block = server.attach()
    record = block.frontends[0]
    record.claim()
    models = Models(FrontEnd(server, block, record))
    await asyncio.to_thread(models.load)

    async with models.running(), kept_clean(models.services):
        engines = models.require_only().engines
        assert engines is not None
        await engines.ready()
        yield _Embedded(build_app(models))


class _Embedded:
    """An application that runs while its block does, whatever a server tells it of starts and
    ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lifespan = Router()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._lifespan if scope["type"] == "lifespan" else self._app
        await app(scope, receive, send)
