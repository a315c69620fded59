"""A source to fetch: how far the fetch is, and the tries that it makes, since much that fails once
succeeds later.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from lmi.errors import ModelUnusable, SourceUnreachable
from lmi.sources.fetches import DOWNLOAD, FetchReport, WantedSource
from lmi.sources.place import SPARE_BYTES

# The seconds over which the rate is measured.
WINDOW_S = 10.0
# The seconds between five tries.
DELAYS_S = (1.0, 2.0, 4.0, 8.0)
# The longest wait between tries that a server may ask for.
MAX_WAIT_S = 300.0
# A try to which no byte comes for so long has failed.
NO_BYTE_S = 60.0
MAX_FILES_AT_ONCE = 8
# The statuses of HTTP after which another try may succeed.
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Sample(NamedTuple):
    """How many bytes had come at a time of the clock."""

    time_s: float
    num_bytes: int


class Progress:
    """Counts the bytes and files of a fetch, from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._report = FetchReport()
        # Those of the last WINDOW_S, by which the rate is measured.
        self._samples: deque[_Sample] = deque()
        # Set once a file of the source has failed.
        self.stopped = threading.Event()

    def begin(
        self, source: object, total_bytes: int, total_files: int, stage: str = DOWNLOAD
    ) -> None:
        """Count from zero, at the beginning of a source, a stage or a further try."""
        with self._lock:
            self._report = FetchReport(
                stage=stage, source=str(source), total_bytes=total_bytes, total_files=total_files
            )
            self._samples.clear()

        self.stopped.clear()

    def add(self, num_bytes: int) -> None:
        """Count bytes that came. A negative number takes back bytes that must be fetched again.

        Raises Stopped once another file has failed.
        """
        if num_bytes > 0 and self.stopped.is_set():
            raise Stopped

        with self._lock:
            self._report.num_bytes += num_bytes

    def file_done(self) -> None:
        with self._lock:
            self._report.num_files += 1

    def report(self) -> FetchReport:
        """Return how far the fetch is now, and its rate."""
        with self._lock:
            num_bytes = max(0, self._report.num_bytes)
            total_bytes = self._report.total_bytes
            share = min(1.0, num_bytes / total_bytes) if total_bytes else 0.0
            return msgspec.structs.replace(
                self._report,
                num_bytes=num_bytes,
                share=share,
                bytes_per_s=self._bytes_per_s(num_bytes),
            )

    def _bytes_per_s(self, num_bytes: int) -> float:
        """Take a sample, and return the rate since the oldest one of the window."""
        now_s = self._clock()
        self._samples.append(_Sample(now_s, num_bytes))
        while len(self._samples) > 2 and self._samples[0].time_s < now_s - WINDOW_S:
            self._samples.popleft()

        first = self._samples[0]
        if now_s <= first.time_s:
            return 0.0

        return max(0.0, (num_bytes - first.num_bytes) / (now_s - first.time_s))


@dataclass(frozen=True, slots=True)
class FetchJob:
    """A source that is fetched now."""

    wanted: WantedSource
    progress: Progress = field(default_factory=Progress)
    # The seconds between tries.
    delays_s: tuple[float, ...] = DELAYS_S
    # The bytes of the disk that must stay free.
    spare_bytes: int = SPARE_BYTES


def run_all(tasks: Sequence[Callable[[], None]], progress: Progress) -> None:
    """Run tasks in threads, of which each fetches a file. After the first error the others stop,
    and it is raised when all have ended.
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
    a status of PASSING_STATUSES.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        # How long the server asks to wait, as by Retry-After.
        self.wait_s = min(wait_s, MAX_WAIT_S)


class Damaged(Exception):
    """A file has another size or hash than the source told, or changed while it was read."""

    def __init__(self, subject: str = "", *, wanted: object, found: object) -> None:
        """`subject` names the file, where several are tried together."""
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
    """Return what `once` returns. After MayPass it is called again when the next delay is over, and
    after Damaged once more at once.

    `reached` returns how far the tries have come. When one comes farther than all before, the
    delays begin anew. Raises SourceUnreachable with the last cause when no delay is left, and
    ModelUnusable after the second Damaged.
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
