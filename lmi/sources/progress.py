"""Counts the bytes and files of a fetch, from any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from lmi.shared.fetches import FetchReport

WINDOW_S = 10.0  # over which the rate is measured


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
