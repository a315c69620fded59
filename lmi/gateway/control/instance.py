"""One instance: a container, which is an `lmi serve` process and is started again when it ends."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from lmi.errors import PortUnavailable, cause_line
from lmi.gateway.control.definition import Launch
from lmi.gateway.watched_container import WatchedContainer
from lmi.shared.processes import describe_exit

HOST = "127.0.0.1"
POLL_S = 0.1
# Another process may take the free port that was found.
NUM_PORTS = 3
# For requests that are open, longer than the longest of them.
FINISH_S = 600.0
# After SIGTERM, as SageMaker.
END_S = 30.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Of a log, where its last line is looked for.
TAIL_BYTES = 64 << 10

log = logging.getLogger(__name__)


Prepare = Callable[[WatchedContainer], Awaitable[None]]


class InstanceFailed(Exception):
    """A container did not become ready. The text is the reason."""


class Instance:
    """An instance that runs what `launch` says, whose output goes to a log file."""

    def __init__(self, launch: Launch, log_file: Path, timeout_s: float, prepare: Prepare) -> None:
        self.num_requests = 0
        self.is_ready = False

        self._launch = launch
        self._log_file = log_file
        self._timeout_s = timeout_s
        # What is done with each container before it takes requests.
        self._prepare = prepare

        self._idle = asyncio.Event()
        self._idle.set()

        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.container = WatchedContainer(f"http://{HOST}:1")

    async def start(self) -> None:
        """Return when the container serves. Raises InstanceFailed, and leaves no process then."""
        await self._run_until_ready()
        self._watch = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the container, after its requests."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])

        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self._idle.wait()

        await self._end()

    @contextmanager
    def lease(self) -> Iterator[WatchedContainer]:
        """In the block the container is not ended, unless it ends itself."""
        self.num_requests += 1
        self._idle.clear()
        try:
            yield self.container
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self._idle.set()

    async def _run_until_ready(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(NUM_PORTS):
                    await self._spawn()
                    if await self._wait_until_ready():
                        await self._prepare(self.container)
                        self.is_ready = True
                        return

            raise InstanceFailed("No port was free.")
        except TimeoutError:
            await self._end()
            raise InstanceFailed(f"It was not ready within {self._timeout_s:g} s.") from None
        except OSError as error:
            await self._end()
            raise InstanceFailed(f"It could not be started: {cause_line(error)}") from error
        except BaseException:
            await self._end()
            raise

    async def _spawn(self) -> None:
        port = _free_port()
        self.container = WatchedContainer(f"http://{HOST}:{port}")

        words = ["serve", self._launch.model, "--host", HOST, "--port", str(port)]
        words += ["--set", "log_format=json"]
        module = [sys.executable, "-P", "-m", "lmi.gateway.control.launch", str(os.getpid())]

        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log_file, "ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *module,
                *words,
                env=self._launch.environ,
                cwd=self._log_file.parent,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A signal of the terminal is for the gateway.
                start_new_session=True,
            )

    async def _wait_until_ready(self) -> bool:
        """Return True when the container serves, or False where its port was taken. Raises
        InstanceFailed.
        """
        assert self._process is not None
        while self._process.returncode is None:
            state = await self.container.state()
            if state.status == "Failed":
                raise InstanceFailed(state.failure_reason)

            if state.status == "InService":
                return True

            await asyncio.sleep(POLL_S)

        if self._process.returncode == PortUnavailable.exit_code:
            return False

        raise InstanceFailed(self._last_words(self._process.returncode))

    def _last_words(self, code: int) -> str:
        """Return why the process has ended: the message of its last line, or how it ended."""
        with suppress(OSError, ValueError, TypeError, LookupError):
            with open(self._log_file, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - TAIL_BYTES))
                last_line = file.read().splitlines()[-1]

            return str(orjson.loads(last_line)["message"])

        return f"The process {describe_exit(code)}."

    async def _keep(self) -> None:
        """Start the container again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self.is_ready = False
            log.warning(
                "a container %s, and is started again: %s", describe_exit(code), self._log_file.name
            )
            await asyncio.sleep(pause_s)
            try:
                await self._run_until_ready()
                pause_s = FIRST_PAUSE_S
            except InstanceFailed as failure:
                log.warning("a container did not start again: %s", failure)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _end(self) -> None:
        """End the process, if it runs."""
        self.is_ready = False
        process = self._process
        if process is None or process.returncode is not None:
            return

        with suppress(ProcessLookupError):
            process.terminate()

        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()

            await process.wait()


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])
