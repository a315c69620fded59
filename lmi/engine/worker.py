"""The engine process: `python -m lmi.engine.worker --slot N --load-with MODULE:FUNCTION`, one replica behind a socket.

It loads the model with the function that its handler names, writes the progress into its record, by which alone the
supervisor judges whether it hangs, then serves front ends until SIGTERM. Exit codes are those of `lmi.errors`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Self, cast

import lmi.shared.log
from lmi.adapters.folder import adapters_of
from lmi.adapters.keeper import AdapterKeeper
from lmi.engine.overload import LearningQueue
from lmi.engine.server import Dispatcher, FrontEndConnection
from lmi.errors import BadConfiguration
from lmi.executor import Executor, Progress
from lmi.ipc import listen
from lmi.runtime import LoadReport, Runtime
from lmi.settings.config import EngineConfig
from lmi.shared import linux, slot_process
from lmi.shared.sink import stream
from lmi.shared.state import EngineRecord, Phase

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

BEAT_S = 0.2
LOG_S = 1.0  # the least time between two lines about the progress of a load
FINISH_S = 2.0  # for requests that are still open at SIGTERM

# Loads a model. Raises a StartError that names the file or option at fault, or ImportError for a missing library.
Loader = Callable[[EngineConfig, str, Progress], Executor]

log = logging.getLogger("lmi.engine.worker")  # this module is __main__ where it runs


class Loading:
    """Reports the progress of a load: in the record, and to people as a bar on a terminal or as lines in the log."""

    def __init__(self, record: EngineRecord, *, has_bar: bool) -> None:
        self.stages_s: dict[str, float] = {}
        self._record = record
        self._started_s = time.monotonic()
        self._tenth, self._logged_s = -1, 0.0
        self._bar: Bar | None = None
        if has_bar:
            from rich.console import Console
            from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
            self._bar = Bar(*columns, console=Console(file=stream(lmi.shared.log.fd())), transient=True)
            self._task = self._bar.add_task("import", total=1.0)

    def __call__(self, stage: str, share: float) -> None:
        now = time.monotonic()
        if stage != self._record.stage:
            self._end_stage(now)
            self._record.stage = stage
        self._record.progress = share
        self._record.beat_s = now
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=share)
        elif (tenth := int(share * 10)) > self._tenth and now - self._logged_s >= LOG_S:
            self._tenth, self._logged_s = tenth, now
            log.info("loading: %s %d %%", stage, tenth * 10)

    def _end_stage(self, now: float) -> None:
        if stage := self._record.stage:
            self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now - self._started_s
        self._started_s, self._tenth, self._logged_s = now, -1, 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            self._end_stage(time.monotonic())
            self._record.stage = ""


class Worker:
    """An executor and its dispatcher, in a process that ends with one of them."""

    def __init__(self, executor: Executor, record: EngineRecord, runtime: Runtime) -> None:
        engine, max_wait_s = runtime.config.engine, runtime.config.server.max_queue_wait_s
        self._dispatcher = Dispatcher(executor, record, engine.model_loading_timeout_s, max_wait_s, LearningQueue)
        self._adapters = AdapterKeeper(executor, adapters_of(runtime), self._dispatcher)
        self._has_failed = False
        self._executor = executor
        self._record = record
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def serve(self, socket_path: str, client_uid: int | None = None) -> None:
        """Serve until SIGTERM. Raises RuntimeError if the executor stops before.

        Raises ModelUnusable if an adapter beside the model cannot be loaded in a server that starts.
        """
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._stop.set)
        self._record.stage = "adapters"
        await (self._adapters.load_first() if self._record.num_starts <= 1 else self._adapters.follow())
        self._record.stage = ""
        server = await listen(lambda: FrontEndConnection(self._dispatcher), socket_path, client_uid)
        self._executor.pass_responses_to(self._dispatcher.deliver)
        self._beat()
        gc.freeze()  # loaded objects stay; without this a full collection would hold up every stream
        self._record.phase = Phase.READY
        await self._stop.wait()
        self._dispatcher.is_closing = True
        self._record.phase = Phase.DRAINING
        server.close()
        deadline_s = time.monotonic() + FINISH_S
        while self._dispatcher.num_requests and not self._has_failed and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the executor's shutdown
        if self._has_failed:
            raise RuntimeError("the executor has stopped by itself")

    def _beat(self) -> None:
        self._record.beat_s = time.monotonic()
        lmi.shared.log.follow(self._record.block.supervisor.log_level)
        self._dispatcher.observe()
        self._adapters.look()
        if not self._executor.can_enqueue_requests() and not self._stop.is_set():
            self._has_failed = True
            self._stop.set()
        self._loop.call_later(BEAT_S, self._beat)


def resolve(handler: str, load: str) -> Loader:
    """Return the function `load`, a "module:function", which loads the engine of `handler`.

    It is the first to import the engine's module. Raises BadConfiguration for a handler whose library is missing.
    """
    module, _, name = load.partition(":")
    try:
        return cast(Loader, attrgetter(name)(import_module(module)))
    except ImportError as error:
        raise missing_library(handler, error) from error


def missing_library(handler: str, error: ImportError) -> BadConfiguration:
    return BadConfiguration(f"engine {handler} cannot be used here, a library is missing: {error}")


def load(runtime: Runtime, record: EngineRecord, function: str) -> tuple[Executor, LoadReport]:
    """Load the configured engine with a "module:function". Raises StartError for a fault that an operator can mend."""
    engine, is_text = runtime.config.engine, runtime.config.server.log_format != "json"
    with Loading(record, has_bar=engine.num_engines == 1 and is_text and os.isatty(lmi.shared.log.fd())) as loading:
        loading("import", 0.0)
        load_engine = resolve(engine.handler, function)
        try:
            executor = load_engine(engine, runtime.config.model.path, loading)
        except ImportError as error:
            raise missing_library(engine.handler, error) from error
    info = executor.info
    return executor, LoadReport(
        engine=info.name,
        device=info.device,
        dtype=info.dtype,
        kernels=info.kernels,
        max_sequence_length=info.max_sequence_length,
        max_num_sequences=info.max_num_sequences,
        gives_embeddings=info.capabilities.embeddings is not None,
        stages_s=loading.stages_s,
    )


async def serve(executor: Executor, record: EngineRecord, runtime: Runtime, slot: int) -> None:
    user = runtime.config.server.user
    await Worker(executor, record, runtime).serve(runtime.engine_socket(slot), user.uid if user else None)


def run(slot: int, load_with: str) -> int:
    """Load the engine and serve until SIGTERM. Returns the exit code."""
    runtime = Runtime.from_environ()
    record, server = runtime.attach().engines[slot], runtime.config.server

    def body() -> None:
        executor, report = load(runtime, record, load_with)
        with executor:
            runtime.write_report(slot, report)
            linux.keep_to_cores()  # only now, because compilers of a model may use all cores
            asyncio.run(serve(executor, record, runtime, slot))

    return slot_process.live(record, f"engine {slot}", server.log_level, server.log_format, body)


if __name__ == "__main__":
    slot_process.main("lmi.engine.worker", __doc__, run, "load-with")
