"""One source to fetch: how far that is, and how patient: what may pass is tried again."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from lmi.errors import ModelUnusable, SourceUnreachable
from lmi.sources.fetches import DOWNLOAD, FetchReport, WantedSource
from lmi.sources.place import SPARE_BYTES

# The seconds over which the rate is measured.
WINDOW_S = 10.0
# The seconds between five tries.
DELAYS_S = (1.0, 2.0, 4.0, 8.0)
# The longest wait that another side may ask for.
MAX_WAIT_S = 300.0
# So long without one byte a try has failed.
NO_BYTE_S = 60.0
MAX_FILES_AT_ONCE = 8
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})

log = logging.getLogger(__name__)

T = TypeVar("T")


class Progress:
    """Counts the bytes and files of a fetch, from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._report = FetchReport()
        # Samples of (seconds, bytes).
        self._samples: deque[tuple[float, int]] = deque()
        # Set once a file of the source has failed.
        self.stopped = threading.Event()

    def begin(
        self, source: object, total_bytes: int, total_files: int, stage: str = DOWNLOAD
    ) -> None:
        """Count from zero: a source begins, a further try, or the next stage."""
        with self._lock:
            self._report = FetchReport(
                stage=stage, source=str(source), total_bytes=total_bytes, total_files=total_files
            )
            self._samples.clear()

        self.stopped.clear()

    def add(self, num_bytes: int) -> None:
        """Count bytes, or take back those that must be fetched again. Raises Stopped once another
        file failed.
        """
        if num_bytes > 0 and self.stopped.is_set():
            raise Stopped

        with self._lock:
            self._report.num_bytes += num_bytes

    def file_done(self) -> None:
        with self._lock:
            self._report.num_files += 1

    def report(self) -> FetchReport:
        with self._lock:
            num_bytes = max(0, self._report.num_bytes)
            total_bytes = self._report.total_bytes
            now_s = self._clock()
            self._samples.append((now_s, num_bytes))
            while len(self._samples) > 2 and self._samples[0][0] < now_s - WINDOW_S:
                self._samples.popleft()

            first_s, first_bytes = self._samples[0]
            bytes_per_s = 0.0
            if now_s > first_s:
                bytes_per_s = max(0.0, (num_bytes - first_bytes) / (now_s - first_s))

            return msgspec.structs.replace(
                self._report,
                num_bytes=num_bytes,
                share=min(1.0, num_bytes / total_bytes) if total_bytes else 0.0,
                bytes_per_s=bytes_per_s,
            )


@dataclass(frozen=True, slots=True)
class FetchJob:
    wanted: WantedSource
    progress: Progress = field(default_factory=Progress)
    # Seconds between tries.
    delays_s: tuple[float, ...] = DELAYS_S
    # Bytes of the disk that stay free.
    spare_bytes: int = SPARE_BYTES


def run_all(tasks: Sequence[Callable[[], None]], progress: Progress) -> None:
    """Run in threads what brings one file each. The first error stops the others, and is raised
    when all have ended.
    """
    with ThreadPoolExecutor(MAX_FILES_AT_ONCE, "download") as pool:
        try:
            for future in as_completed([pool.submit(task) for task in tasks]):
                future.result()
                progress.file_done()
        finally:
            progress.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


class Stopped(Exception):
    """Another file of the same source failed."""


class MayPass(Exception):
    """A try failed for a reason that may pass: a connection, a name that is not found, a time-out,
    429 or 5xx.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        # How long the other side asks to be left alone.
        self.wait_s = min(wait_s, MAX_WAIT_S)


class Damaged(Exception):
    """What arrived is not what was promised: its size, its hash, or the object changed while it was
    read.

    `subject` is given where several things are tried together.
    """

    def __init__(self, subject: str = "", *, wanted: object, found: object) -> None:
        difference = f"wanted {wanted}, found {found}"
        super().__init__(f"{subject}: {difference}" if subject else difference)


def attempt(
    once: Callable[[], T],
    source: object,
    delays_s: Sequence[float],
    *,
    reached: Callable[[], int] = lambda: 0,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what `once` returns. It is called again after each delay if it raises MayPass, and
    once after Damaged.

    `reached` says how far the tries have come. Whenever one comes farther than all before, the
    delays begin anew. Raises SourceUnreachable with the last cause, or ModelUnusable if it was
    Damaged twice.
    """
    num_damaged = 0
    waits = list(delays_s)
    farthest = reached()
    while True:
        try:
            return once()
        except MayPass as error:
            num_reached = reached()
            if num_reached > farthest:
                waits = list(delays_s)
                farthest = num_reached

            if not waits:
                raise SourceUnreachable(f"{source}: {error} ({len(delays_s) + 1} tries)") from error

            wait_s = max(waits.pop(0), error.wait_s)
            log.warning("%s: %s; the next try is in %g s", source, error, wait_s)
            wait(wait_s)
        except Damaged as error:
            num_damaged += 1
            if num_damaged == 2:
                raise ModelUnusable(f"{source}: {error}, twice") from error

            log.warning("%s: %s; it is fetched once more", source, error)
