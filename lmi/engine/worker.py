"""The engine process: `python -m lmi.engine.worker --slot N --load-with MODULE:FUNCTION`, one
replica behind a socket.

It loads the model with the function that its handler names, writes the progress into its record, by
which alone the supervisor judges whether it hangs, then serves front ends until SIGTERM. Exit codes
are those of `lmi.errors`.
"""

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from operator import attrgetter
from typing import cast

import lmi.shared.log
from lmi.adapters.files import adapters_of
from lmi.adapters.keeper import AdapterKeeper
from lmi.engine.overload import LearningQueue
from lmi.engine.progress import shown
from lmi.engine.server import Dispatcher, FrontEndConnection
from lmi.errors import BadConfiguration
from lmi.executor import Executor
from lmi.ipc import listen
from lmi.runtime import LoadReport, Runtime
from lmi.shared import linux, slot_process
from lmi.shared.state import EngineRecord, Phase

BEAT_S = 0.2
# So long may requests take that are still open at SIGTERM.
FINISH_S = 2.0


def resolve(handler: str, load: str) -> Callable[..., Executor]:
    """Return the function `load`, a "module:function", which loads the engine of `handler`.

    It is the first to import the engine's module. Raises BadConfiguration for a handler whose
    library is missing.
    """
    module, _, name = load.partition(":")
    try:
        return cast(Callable[..., Executor], attrgetter(name)(import_module(module)))
    except ImportError as error:
        raise missing_library(handler, error) from error


def missing_library(handler: str, error: ImportError) -> BadConfiguration:
    return BadConfiguration(f"engine {handler} cannot be used here, a library is missing: {error}")


def load(runtime: Runtime, record: EngineRecord, function: str) -> tuple[Executor, LoadReport]:
    """Load the configured engine with a "module:function". Raises StartError for a fault that an
    operator can mend.
    """
    engine = runtime.config.engine
    log_format = runtime.config.server.log_format
    with shown(has_bar=engine.num_engines == 1, format=log_format) as stages:

        def report(stage: str, share: float) -> None:
            record.stage = stage
            record.progress = share
            record.beat_s = time.monotonic()
            stages(stage, share)

        report("import", 0.0)
        load_engine = resolve(engine.handler, function)
        try:
            executor = load_engine(engine, runtime.config.model.path, report)
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
        stages_s=stages.seconds,
    )


async def serve(executor: Executor, record: EngineRecord, runtime: Runtime, slot: int) -> None:
    """Serve front ends until SIGTERM. Raises RuntimeError if the executor stops before.

    Raises ModelUnusable if an adapter beside the model cannot be loaded before an engine of this
    slot was ever ready.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    async with serving(executor, record, runtime, slot, stop):
        # Loaded objects stay; without this a full collection would hold up every stream.
        gc.freeze()
        await stop.wait()
        has_failed = not executor.can_enqueue_requests()

    loop.remove_signal_handler(signal.SIGTERM)
    # A second one must not interrupt the executor's shutdown.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if has_failed:
        raise RuntimeError("the executor has stopped by itself")


@asynccontextmanager
async def serving(
    executor: Executor, record: EngineRecord, runtime: Runtime, slot: int, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Serve front ends while the block runs, then let open requests end. Sets `stop` if the
    executor stops by itself.

    Raises ModelUnusable as `serve` does.
    """
    loop = asyncio.get_running_loop()
    server = runtime.config.server
    timeout_s = runtime.config.engine.model_loading_timeout_s
    dispatcher = Dispatcher(executor, record, _queue(executor, runtime))
    adapters = AdapterKeeper(executor, adapters_of(runtime), dispatcher, timeout_s)
    next_beat: asyncio.TimerHandle | None = None

    def beat() -> None:
        nonlocal next_beat
        record.beat_s = time.monotonic()
        lmi.shared.log.follow(record.block.supervisor.log_level)
        dispatcher.observe()
        note_memory(executor, record)
        adapters.look()
        if not executor.can_enqueue_requests():
            stop.set()

        next_beat = loop.call_later(BEAT_S, beat)

    record.stage = "adapters"
    if record.was_ready:
        await adapters.follow()
    else:
        await adapters.load_first()

    record.stage = ""
    uid = server.user.uid if server.user else None
    listener = await listen(
        lambda: FrontEndConnection(dispatcher), runtime.engine_socket(slot), uid
    )
    executor.pass_responses_to(dispatcher.deliver)
    beat()

    record.was_ready = 1
    record.phase = Phase.READY
    try:
        yield
    finally:
        dispatcher.is_closing = True
        record.phase = Phase.DRAINING
        listener.close()
        if executor.can_enqueue_requests():
            await _wait_for_requests(dispatcher)

        if next_beat is not None:
            next_beat.cancel()


async def _wait_for_requests(dispatcher: Dispatcher) -> None:
    """Wait until no request is open, for FINISH_S at most."""
    deadline_s = time.monotonic() + FINISH_S
    while dispatcher.num_requests and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)


def note_memory(executor: Executor, record: EngineRecord) -> None:
    """Write what the engine holds of the memory into its record, where it knows."""
    use = executor.memory_use
    if use is None:
        return

    record.weights_bytes = use.weights
    record.kv_cache_bytes = use.kv_cache_reserved
    record.kv_cache_touched_bytes = use.kv_cache_touched
    record.process_bytes = linux.process_bytes()


def _queue(executor: Executor, runtime: Runtime) -> LearningQueue:
    info = executor.info
    server = runtime.config.server
    return LearningQueue(
        info.max_num_sequences,
        server.max_queue_wait_s,
        info.num_express_places,
        keeps_short=server.keeps_queue_short,
    )


def run(slot: int, load_with: str) -> int:
    """Load the engine and serve until SIGTERM. Returns the exit code."""
    runtime = Runtime.from_environ()
    record = runtime.attach().engines[slot]
    server = runtime.config.server

    def body() -> None:
        executor, report = load(runtime, record, load_with)
        with executor:
            runtime.write_report(slot, report)
            # Only now, because compilers of a model may use all cores.
            linux.keep_to_cores()
            asyncio.run(serve(executor, record, runtime, slot))

    return slot_process.live(record, f"engine {slot}", server.log_level, server.log_format, body)


if __name__ == "__main__":
    slot_process.main("lmi.engine.worker", __doc__, run, "load-with")
