"""Counts the bytes and files of a fetch, from any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

WINDOW_S = 10.0  # over which the rate is measured


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fetch is."""

    stage: str = "download"  # or "unpack"
    source: str = ""
    share: float = 0.0  # of the bytes, 0 to 1
    num_bytes: int = 0  # that arrived, of `total_bytes`
    total_bytes: int = 0  # that were missing when the fetch began
    bytes_per_s: float = 0.0  # of the last ten seconds
    num_files: int = 0
    total_files: int = 0

    def __str__(self) -> str:
        if not self.total_files:
            return f"{self.stage} of {self.source}: waits for the list of its files"
        amount = f"{readable(self.num_bytes)} of {readable(self.total_bytes)}, {readable(self.bytes_per_s)}/s"
        return (
            f"{self.stage} of {self.source}: {self.share:.0%}, {amount}, {self.num_files} of {self.total_files} files"
        )


class Progress:
    """Counts what arrives."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = FetchReport()
        self._num_bytes = 0
        self._num_files = 0
        self._samples: deque[tuple[float, int]] = deque()  # (seconds, bytes)

    def begin(self, source: object, total_bytes: int, total_files: int, stage: str = "download") -> None:
        """Count from zero: a source begins, a further try, or the next stage."""
        with self._lock:
            self._state = FetchReport(stage=stage, source=str(source), total_bytes=total_bytes, total_files=total_files)
            self._num_bytes = self._num_files = 0
            self._samples.clear()

    def add(self, num_bytes: int) -> None:
        """Count bytes. A negative number takes bytes back that must be fetched again."""
        with self._lock:
            self._num_bytes += num_bytes

    def file_done(self) -> None:
        with self._lock:
            self._num_files += 1

    def report(self) -> FetchReport:
        with self._lock:
            num_bytes = max(0, self._num_bytes)
            total = self._state.total_bytes
            return msgspec.structs.replace(
                self._state,
                num_bytes=num_bytes,
                share=min(1.0, num_bytes / total) if total else 0.0,
                bytes_per_s=self._rate(num_bytes),
                num_files=self._num_files,
            )

    def _rate(self, num_bytes: int) -> float:
        now = self._clock()
        self._samples.append((now, num_bytes))
        while len(self._samples) > 2 and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        return max(0.0, (num_bytes - before) / (now - then)) if now > then else 0.0


def readable(num_bytes: float) -> str:
    """Return a number of bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
