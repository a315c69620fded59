"""Adapters over the engine sockets: two front ends, two engine processes, and an engine killed and
restarted.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from lmi.adapters.files import Adapter, adapters_of, register_beside
from lmi.adapters.keeper import AdapterKeeper
from lmi.adapters.registry import AdapterRegistry, AdapterUnusable, NameTaken, NotRegistered
from lmi.engine.client import Engines, ResponseStream
from lmi.engine.messages import Ready
from lmi.engine.server import Dispatcher
from lmi.errors import (
    DeadlineExceeded,
    EngineLost,
    InvalidParameter,
    LmiError,
    ModelUnusable,
    OutOfMemory,
    UnknownAdapter,
    Unsupported,
)
from lmi.executor import LoraConfig, Request, Result, SamplingConfig
from lmi.runtime import ENVIRONMENT_NAME, Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.desired_state import Folder, State, key
from lmi.shared.state import Block, Phase
from lmi.supervisor.hangs import HangLimits, hang
from lmi.supervisor.pauses import LATE_TURN_S, Pauses
from tests.engine.test_worker import FrontEnd
from tests.system.engines.foreign_engine import MAX_ADAPTERS, Executor, write_adapter

ROOT = Path(__file__).parents[2]
NUM_ENGINES = 2
PROMPT = (11, 12)
TIMEOUT_S = 60


class Server:
    """Engine processes and the runtime folder that they share with front ends."""

    def __init__(self, folder: Path, lora: bool = True) -> None:
        options = {"enable_lora": str(lora).lower()}
        static = write_adapter(folder / "model" / "adapters" / "static", shift=100)
        config = Config(
            server=ServerConfig(log_format="json"),
            model=ModelConfig(
                path=str(folder / "model"), name="m", adapters={"static": str(static)}
            ),
            engine=EngineConfig(handler="foreign", num_engines=NUM_ENGINES, options=options),
        )
        (folder / "runtime").mkdir()
        self.runtime = Runtime.create(config, folder / "runtime", register_beside)
        self.block: Block = self.runtime.attach()
        self.log = folder / "log"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, slot: int) -> None:
        self.block.engines[slot].phase = Phase.LOADING
        paths = f"{ROOT}:{ROOT / 'tests/system/engines'}"
        environ = {**os.environ, ENVIRONMENT_NAME: str(self.runtime.path), "PYTHONPATH": paths}
        words = ["--slot", str(slot), "--load-with", "foreign_engine:load"]
        command = [sys.executable, "-P", "-m", "lmi.engine.worker", *words]
        with open(self.log, "ab") as file:
            self.processes[slot] = subprocess.Popen(command, env=environ, stderr=file)

    def kill(self, slot: int) -> None:
        """Kill an engine and note its end as the supervisor does."""
        self.processes[slot].kill()
        self.processes[slot].wait()
        self.block.engines[slot].phase = Phase.LOST

    async def wait_ready(self, slot: int) -> None:
        await until(
            lambda: (
                self.block.engines[slot].phase == Phase.READY
                or self.processes[slot].poll() is not None
            )
        )
        assert self.processes[slot].poll() is None, self.log.read_text()

    @asynccontextmanager
    async def front_end(self) -> AsyncIterator[Engines]:
        sockets = [self.runtime.engine_socket(slot) for slot in range(NUM_ENGINES)]
        engines = Engines(sockets, self.block.engines)
        await engines.start()
        await until(
            lambda: (
                sum(connection.info is not None for connection in engines.open.values())
                == NUM_ENGINES
            )
        )

        try:
            yield engines
        finally:
            await engines.close()


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(tmp_path, lora=getattr(request, "param", True))
    for slot in range(NUM_ENGINES):
        server.start(slot)

    yield server
    for process in server.processes.values():
        process.kill()
        process.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


async def first_tokens(engines: Engines, adapter: str | None) -> set[int]:
    """The first tokens that the engines answer."""
    lora = None if adapter is None else LoraConfig(adapter)
    greedy = SamplingConfig(temperature=0)
    request = Request(
        input_token_ids=PROMPT, max_tokens=1, sampling_config=greedy, lora_config=lora
    )
    tokens = set()
    for connection in engines.open.values():
        [result] = await answer(connection.send(engines.encoded(request)))
        tokens.add(result.output_token_ids[0][0])

    return tokens


async def ready(server: Server) -> None:
    for slot in range(NUM_ENGINES):
        await server.wait_ready(slot)


def test_an_adapter_loaded_through_one_front_end_is_on_every_engine_and_survives_its_restart(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        path = str(write_adapter(tmp_path / "formal", shift=5))
        async with server.front_end() as first, server.front_end() as second:
            folder = adapters_of(server.runtime)
            await AdapterRegistry(first, folder).register(entry("formal", path))

            assert (
                await first_tokens(first, "formal")
                == await first_tokens(second, "formal")
                == {PROMPT[0] + 5}
            )

            await until(lambda: first.adapters == second.adapters == ("formal", "static"))

            server.kill(0)
            await until(lambda: len(second.open) == NUM_ENGINES - 1)
            server.start(0)
            await until(
                lambda: all(len(front_end.open) == NUM_ENGINES for front_end in (first, second))
            )
            await until(
                lambda: all(connection.info is not None for connection in second.open.values())
            )

            assert {one.info and one.info.adapters for one in second.open.values()} == {
                ("formal", "static")
            }
            assert await first_tokens(second, "formal") == {PROMPT[0] + 5}

            await AdapterRegistry(second, folder).unregister("formal")
            assert names(folder) == ["static"]

            await until(lambda: first.adapters == ("static",))
            for connection in first.open.values():
                with pytest.raises(UnknownAdapter, match="Adapter formal is not registered"):
                    await answer(connection.send(first.encoded(asking("formal"))))

    run(test)


def entry(name: str, path: Path | str, *, pinned: bool = False) -> Adapter:
    return Adapter(name=name, path=str(path), is_pinned=pinned, state=State.READY)


def names(folder: Folder[Adapter]) -> list[str]:
    return [entry.name for entry in folder.entries()]


def asking(adapter: str) -> Request:
    return Request(input_token_ids=PROMPT, max_tokens=1, lora_config=LoraConfig(adapter))


async def answer(stream: ResponseStream) -> list[Result]:
    results: list[Result] = []
    await asyncio.wait_for(stream.forward(results.append), TIMEOUT_S)
    return results


def test_an_engine_that_was_not_told_follows_the_folder(server: Server, tmp_path: Path) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            folder = adapters_of(server.runtime)
            loaded = ("formal", "static")
            path, new_source = (
                str(write_adapter(tmp_path / name, shift)) for name, shift in (("a", 5), ("b", 6))
            )
            registry = AdapterRegistry(Engines([], []), folder)
            with pytest.raises(LmiError, match="no engine is ready"):
                await registry.register(entry("formal", path))

            assert names(folder) == ["static"], "what could not be loaded is not registered"

            write_down(server, path)
            await until(
                lambda: all(
                    connection.info and connection.info.adapters == loaded
                    for connection in engines.open.values()
                )
            )
            assert await first_tokens(engines, "formal") == {PROMPT[0] + 5}

            write_down(server, new_source)
            await until_answer(engines, {PROMPT[0] + 6})
            await registry.unregister("formal")
            await until(
                lambda: all(
                    connection.info and connection.info.adapters == ("static",)
                    for connection in engines.open.values()
                )
            )

    run(test)


class FullFolder(Folder[Adapter]):
    """A folder on a disk that has room for one entry more."""

    def replace(self, entry: Adapter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_adapter_that_cannot_be_written_down_is_on_no_engine_and_its_name_is_free(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            folder = adapters_of(server.runtime)
            path = str(write_adapter(tmp_path / "a", 5))
            full = FullFolder(server.runtime.path / "adapters" / key("m"), Adapter)
            with pytest.raises(OSError, match="No space left"):
                await AdapterRegistry(engines, full).register(entry("formal", path))

            assert names(folder) == ["static"]

            await until(
                lambda: all(
                    connection.info and connection.info.adapters == ("static",)
                    for connection in engines.open.values()
                )
            )
            await AdapterRegistry(engines, folder).register(entry("formal", path))

    run(test)


async def until_answer(engines: Engines, tokens: set[int]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if await first_tokens(engines, "formal") == tokens:
                    return
            except UnknownAdapter:  # between the two
                pass

            await asyncio.sleep(0.01)


def write_down(server: Server, path: str) -> None:
    adapters_of(server.runtime).replace(entry("formal", path))


def test_an_adapter_is_on_all_engines_or_on_none(server: Server, tmp_path: Path) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            path = write_adapter(tmp_path / "formal", shift=5)
            source = str(write_adapter(tmp_path / "other", 7))
            folder = adapters_of(server.runtime)
            assert folder.add(Adapter(name="formal", path=source, state=State.PENDING))

            await until(lambda: engines.adapters == ("formal", "static"))
            with pytest.raises(NameTaken, match="Adapter formal is registered already"):
                await registry.register(entry("formal", path))

            with pytest.raises(NameTaken, match="Adapter formal is being registered"):
                await registry.unregister("formal")

            assert folder.remove("formal")

            # The engine follows the folder
            await until(lambda: engines.adapters == ("static",))
            (path / "adapter_model.safetensors").write_text("{}")
            with pytest.raises(AdapterUnusable, match="Foreign cannot load this adapter: 'shift'"):
                await registry.register(entry("formal", path))

            with pytest.raises(
                AdapterUnusable, match="an adapter's folder has an adapter_config.json"
            ):
                await registry.register(entry("formal", tmp_path))

            with pytest.raises(InvalidParameter, match="name must be 1 to 256 letters"):
                await registry.register(entry("../formal", path))

            with pytest.raises(NotRegistered, match="Adapter formal is not registered"):
                await registry.unregister("formal")

            assert engines.adapters == ("static",) and names(folder) == ["static"]

            path = write_adapter(tmp_path / "good", shift=5)
            # So that only the second has room
            pinned = write_adapter(tmp_path / "kept", 6, fails_in="lmi-engine-1")
            assert folder.add(entry("pinned", pinned, pinned=True))

            await until(
                lambda: all("pinned" in connection.outcomes for connection in engines.open.values())
            )
            with pytest.raises(OutOfMemory, match=f"{MAX_ADAPTERS} adapters fit"):
                await registry.register(entry("formal", path, pinned=True))

            assert [
                registered.info and registered.info.adapters
                for _, registered in sorted(engines.open.items())
            ] == [
                ("pinned", "static"),
                ("static",),
            ]

            await registry.register(entry("formal", path))
            with pytest.raises(OutOfMemory, match=f"{MAX_ADAPTERS} adapters fit"):
                await registry.update(entry("formal", path, pinned=True))

            pins = [(registered.name, registered.is_pinned) for registered in registry.entries()]
            assert pins == [("formal", False), ("pinned", True), ("static", False)]
            assert await first_tokens(engines, "formal") == {PROMPT[0] + 5}, (
                "also where the pin was taken back"
            )

    run(test)


def adapters_at(engines: Engines, slot: int) -> tuple[str, ...]:
    info = engines.open[slot].info
    return () if info is None else info.adapters


def test_an_update_that_one_engine_cannot_make_leaves_the_old_adapter_on_all(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            await registry.register(entry("formal", write_adapter(tmp_path / "old", shift=5)))
            for slot in range(NUM_ENGINES):
                path = write_adapter(
                    tmp_path / f"new-{slot}", shift=7, fails_in=f"lmi-engine-{slot}"
                )
                with pytest.raises(AdapterUnusable, match="this replica cannot read it"):
                    await registry.update(entry("formal", path))

                assert (
                    engines.adapters == ("formal", "static") and registry.failure("formal") is None
                )
                assert await first_tokens(engines, "formal") == {PROMPT[0] + 5}

    run(test)


def test_an_update_ends_when_its_adapter_is_unregistered_meanwhile(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            await registry.register(entry("formal", write_adapter(tmp_path / "old", shift=5)))
            slow = entry("formal", write_adapter(tmp_path / "new", shift=7, load_s=0.5))
            update = asyncio.create_task(registry.update(slow))
            # The old one made room
            await until(lambda: engines.adapters == ("static",))
            await registry.unregister("formal")
            await asyncio.wait_for(update, TIMEOUT_S)

            assert engines.adapters == ("static",) and names(adapters_of(server.runtime)) == [
                "static"
            ]

    run(test)


def test_an_engine_that_dies_while_it_loads_ends_the_call(server: Server, tmp_path: Path) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            # It no longer reads
            os.kill(server.processes[0].pid, signal.SIGSTOP)
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            new = entry("formal", write_adapter(tmp_path / "formal", shift=5))
            call = asyncio.create_task(registry.register(new))
            await until(
                lambda: (
                    engines.open[1].info is not None and "formal" in engines.open[1].info.adapters
                )
            )
            server.kill(0)
            with pytest.raises(EngineLost):
                await asyncio.wait_for(call, TIMEOUT_S)

            assert engines.open[1].info is not None and engines.open[1].info.adapters == ("static",)
            assert [adapter.name for adapter in registry.entries()] == ["static"]

    run(test)


def test_an_adapter_that_was_given_up_while_it_loaded_is_unloaded(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            folder = adapters_of(server.runtime)
            path = str(write_adapter(tmp_path / "formal", shift=5))
            assert folder.add(Adapter(name="formal", path=path, state=State.PENDING))

            await until(
                lambda: all("formal" in adapters_at(engines, slot) for slot in range(NUM_ENGINES))
            )
            assert folder.remove("formal")

            await until(
                lambda: all(
                    connection.info and connection.info.adapters == ("static",)
                    for connection in engines.open.values()
                )
            )

    run(test)


def test_an_adapter_whose_front_end_dies_while_it_registers_it_is_unloaded(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        path = str(write_adapter(tmp_path / "formal", shift=5))
        async with server.front_end() as engines:
            writer = subprocess.Popen(["sleep", "60"])
            pending = Adapter(name="formal", path=path, state=State.PENDING, writer=writer.pid)
            assert adapters_of(server.runtime).add(pending)

            await until(
                lambda: all("formal" in adapters_at(engines, slot) for slot in range(NUM_ENGINES))
            )
            writer.kill()
            writer.wait()
            await until(lambda: engines.adapters == ("static",))

    run(test)


def test_an_engine_that_starts_again_without_an_adapter_s_files_says_why_and_the_other_serves(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        path = write_adapter(tmp_path / "formal", shift=5)
        async with server.front_end() as engines:
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            await registry.register(entry("formal", path))
            shutil.rmtree(path)
            server.kill(0)
            await until(lambda: 0 not in engines.open)
            # As the supervisor counts
            server.block.engines[0].num_starts = 2
            server.start(0)
            await until(lambda: 0 in engines.open and engines.open[0].info is not None)

            assert engines.adapters == ("formal", "static")
            assert "adapter_config.json" in str(registry.failure("formal"))

            for _ in range(4):
                stream = engines.submit(asking("formal"))
                await answer(stream)
                assert (await engines.ready("formal")).adapters == ("formal", "static")

    run(test)


@pytest.mark.parametrize("num_starts", [1, 2])
def test_an_adapter_beside_the_model_that_is_broken_ends_every_life_before_the_first_ready_one(
    tmp_path: Path, num_starts: int
) -> None:
    """The second start is that of an engine that was killed while it loaded."""
    server = Server(tmp_path)
    (tmp_path / "model" / "adapters" / "static" / "adapter_model.safetensors").write_text("{")
    server.block.engines[0].num_starts = num_starts
    server.start(0)
    assert server.processes[0].wait(TIMEOUT_S) == ModelUnusable.exit_code
    assert server.block.engines[0].reason.startswith("adapter static: ")


def test_a_load_that_lasts_longer_than_a_step_may_does_not_count_as_a_hang(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        limits = HangLimits.of(EngineConfig(step_timeout_s=3.0, first_step_timeout_s=3.0))
        async with server.front_end() as engines:
            record = server.block.engines[0]
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            request = Request(input_token_ids=PROMPT, max_tokens=500)
            streams = [
                connection.send(engines.encoded(request))
                for connection in engines.open.values()
                for _ in range(12)
            ]
            await until(lambda: record.num_running > 0)
            slow = entry("slow", write_adapter(tmp_path / "slow", shift=5, load_s=4.5))
            call = asyncio.create_task(registry.register(slow))
            late = set()
            pauses = Pauses(LATE_TURN_S)
            while not call.done():
                now = time.monotonic()
                pauses.note(now)
                late.add(hang(record, limits, 0.0, now, pauses))
                await asyncio.sleep(0.01)

            await call
            assert late == {None} and record.num_running > 0, (
                "the requests waited, and nobody was to blame"
            )

            for stream in streams:
                stream.close()

    run(test)


def test_an_adapter_serves_while_it_is_pinned_on_a_replica_that_is_slow(
    server: Server, tmp_path: Path
) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            registry = AdapterRegistry(engines, adapters_of(server.runtime))
            late = entry("late", write_adapter(tmp_path / "late", shift=5, load_s=1.0))
            await registry.register(msgspec.structs.replace(late, preload=False))
            call = asyncio.create_task(
                registry.update(msgspec.structs.replace(late, is_pinned=True))
            )
            while not call.done():
                assert engines.adapters == ("late", "static")
                await asyncio.sleep(0.01)

            await call
            assert [(adapter.name, adapter.is_pinned) for adapter in registry.entries()] == [
                ("late", True),
                ("static", False),
            ]
            assert await first_tokens(engines, "late") == {PROMPT[0] + 5}

    run(test)


def follow(watcher: FrontEnd, *reports: set[str]) -> None:
    """Read what an engine reports until it has named these sets of adapters, in this order."""
    for report in reports:
        while True:
            message = watcher.next()
            assert isinstance(message, Ready)
            if set(message.info.adapters) == report:
                break


def test_a_load_that_takes_too_long_is_given_up_and_undone(server: Server, tmp_path: Path) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            registry = AdapterRegistry(engines, adapters_of(server.runtime), timeout_s=0.3)
            slow = entry("slow", write_adapter(tmp_path / "slow", shift=5, load_s=1.5))
            watchers = [FrontEnd(server.runtime.engine_socket(slot)) for slot in range(NUM_ENGINES)]
            with pytest.raises(
                DeadlineExceeded, match=r"not loaded within model_loading_timeout \(0.3 s\)"
            ):
                await registry.register(slow)

            assert names(adapters_of(server.runtime)) == ["static"]

            for watcher in watchers:
                await asyncio.to_thread(follow, watcher, {"static"}, {"slow", "static"}, {"static"})
                watcher.close()

            await until(lambda: engines.adapters == ("static",))

    run(test)


def test_a_load_that_never_ends_counts_as_a_hang_in_the_end(tmp_path: Path) -> None:
    executor = Executor(EngineConfig(options={"enable_lora": "true"}))
    record = block_of(tmp_path).engines[0]
    path = write_adapter(tmp_path / "slow", shift=5, load_s=3.0)
    with executor:
        dispatcher = Dispatcher(executor, record)
        AdapterKeeper(executor, Folder(tmp_path / "adapters", Adapter), dispatcher, timeout_s=1.0)
        load = threading.Thread(target=executor.load_adapter, args=("slow", str(path)))
        load.start()
        moved = set()
        while load.is_alive():
            dispatcher.observe()
            moved.add(record.step_s)
            time.sleep(0.05)

        assert len(moved) > 3 and time.monotonic() - max(moved) > 0.5


def block_of(folder: Path) -> Block:
    return Block.create(folder / "state", 1, 1)


@pytest.mark.parametrize("server", [False], indirect=True)
def test_an_engine_without_lora_says_so(server: Server, tmp_path: Path) -> None:
    async def test() -> None:
        await ready(server)
        async with server.front_end() as engines:
            with pytest.raises(
                Unsupported, match="lora_config is not supported here: foreign has no adapters"
            ):
                formal = entry("formal", write_adapter(tmp_path / "formal", shift=5))
                await AdapterRegistry(engines, adapters_of(server.runtime)).register(formal)

    run(test)
