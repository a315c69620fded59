"""What all models of one front end share: the server's settings and block, its record, the memory
of bodies.

If it cannot use the model while the server starts, it leaves the reason and an exit code behind.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gunicorn.arbiter import Arbiter  # type: ignore[import-untyped]

from lmi.errors import Draining, StartError
from lmi.http.body import BodyMemory
from lmi.http.exchange import Exchange
from lmi.runtime import ServerRuntime
from lmi.shared.files import write_whole
from lmi.shared.state import Block, FrontEndRecord, Phase

log = logging.getLogger(__name__)

MAX_REPORTED = 1000
NUM_READERS = 2


class FrontEnd:
    """One front end."""

    def __init__(self, runtime: ServerRuntime, block: Block, record: FrontEndRecord) -> None:
        self.runtime = runtime
        self.config = runtime.config
        # The records of the supervisor and of all front ends.
        self.block = block
        # The record of this front end.
        self.record = record
        self.slot = block.frontends.index(record)
        self.body_memory = BodyMemory(record, self.config.max_body_memory)
        # Bounds how many large bodies are read at once: their objects take many times their bytes.
        self.reading = asyncio.Semaphore(NUM_READERS)
        self._reported: set[str] = set()

    @property
    def is_draining(self) -> bool:
        return self.block.supervisor.phase == Phase.DRAINING

    @asynccontextmanager
    async def turn_to_read(self, exchange: Exchange) -> AsyncIterator[None]:
        """Wait until a large body may be read. Raises ClientGone if its client leaves before."""
        has_turn = False

        async def take_turn() -> None:
            nonlocal has_turn
            await self.reading.acquire()
            has_turn = True

        try:
            await exchange.run_while_there(take_turn())
            yield
        finally:
            if has_turn:
                self.reading.release()

    def check_serves(self) -> None:
        """Raise Draining while the server drains, unless another has its port: then new
        connections go to that one, and only those that are open still send requests here.
        """
        if self.is_draining and not self.block.supervisor.heir:
            raise Draining("the server is shutting down and takes no new requests")

    def report_ignored(self, lines: Sequence[str], request_id: str) -> None:
        """Log names without effect: a new one as a warning, then for DEBUG, so that a client does
        not fill the log.
        """
        for line in lines:
            is_new = line not in self._reported and len(self._reported) < MAX_REPORTED
            level = logging.WARNING if is_new else logging.DEBUG
            log.log(level, "%s", line, extra={"request_id": request_id})
            if is_new:
                self._reported.add(line)


def explain(runtime: ServerRuntime, error: Exception) -> int:
    """Write the reason to a file for the supervisor. Returns the exit code, which ends the gunicorn
    master too.
    """
    if not isinstance(error, StartError):
        log.error("the front end failed as it started", exc_info=error)

    try:
        write_whole(runtime.front_end_failure(), describe(error).encode(errors="replace"))
    except OSError:
        # The disk may be full.
        log.error("the front end cannot start: %s", describe(error))

    code: int = Arbiter.WORKER_BOOT_ERROR
    if isinstance(error, StartError):
        code = Arbiter.APP_LOAD_ERROR

    return code


def describe(error: Exception) -> str:
    if isinstance(error, StartError):
        return str(error)

    return f"{type(error).__name__}: {error}"
