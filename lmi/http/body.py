"""Memory of the request bodies in one process: its limit, and its return to the kernel.

A client may announce more than it sends, so bytes count when they arrive. A body is freed before
its request ends. Later only what was made of it counts: the frame for an engine, until the engine
has begun to answer, and what the answer needs of the request.
"""

import asyncio
import ctypes
from typing import Protocol

from lmi.errors import Overloaded

SMALL_BODY_BYTES = 64 << 10
# A block of so many bytes is mapped: it grows without a copy, and is given back when it is freed.
# Bodies of 0.9 MB take 1.25 of what they may have so, and 1.4 with blocks of 1 MB.
MAPPED_BYTES = 256 << 10
# When so many bytes were freed, the heap is trimmed, TRIM_S later.
TRIM_BYTES = 16 << 20
TRIM_S = 1.0
# Source: mallopt(3) and malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

_libc = ctypes.CDLL(None)


class BodyRecord(Protocol):
    """The record in which a process reports the bytes of its bodies."""

    num_body_bytes: int


class BodyMemory:
    """Counts the bytes of bodies in one process, at most `max_bytes`, and writes the count to
    `record`.

    An additional eighth of `max_bytes` is for small bodies alone. So large bodies do not keep small
    ones out, and a few small ones do not keep a large one out.
    """

    def __init__(self, record: BodyRecord, max_bytes: int) -> None:
        self._record = record
        self._max_bytes = max_bytes
        self._num_small_bytes = 0
        self._num_large_bytes = 0
        # The bytes of large bodies that were freed since the heap was trimmed.
        self._num_freed_bytes = 0
        self._trim: asyncio.TimerHandle | None = None

        # Other C libraries than glibc lack it.
        if hasattr(_libc, "mallopt"):
            _libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
            _libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)

    def check_room(self, num_before: int, num_after: int) -> None:
        """Raise Overloaded if a body of `num_before` bytes may not grow to `num_after`."""
        num_small, num_large = self._counts_after(num_before, num_after)
        num_over_small_part = max(0, num_small - self._max_bytes // 8)
        if num_large + num_over_small_part > self._max_bytes:
            raise Overloaded(
                f"request bodies, and requests that no engine has begun to answer, hold the "
                f"{self._max_bytes} bytes that they may have (max_body_memory)"
            )

    def change(self, num_before: int, num_after: int) -> None:
        """Count a body, or what was made of it, of `num_before` bytes that has `num_after` bytes
        now, 0 at its end.
        """
        self._num_small_bytes, self._num_large_bytes = self._counts_after(num_before, num_after)
        self._record.num_body_bytes = self._num_small_bytes + self._num_large_bytes
        if num_before > SMALL_BODY_BYTES:
            self._num_freed_bytes += max(0, num_before - num_after)

        if self._num_freed_bytes >= TRIM_BYTES and self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_S, self._trim_heap)

    def _counts_after(self, num_before: int, num_after: int) -> tuple[int, int]:
        """Return the bytes of all small and of all large bodies after a change of one body."""
        num_small = self._num_small_bytes
        num_large = self._num_large_bytes
        for num_bytes, sign in ((num_before, -1), (num_after, 1)):
            if num_bytes <= SMALL_BODY_BYTES:
                num_small += sign * num_bytes
            else:
                num_large += sign * num_bytes

        return num_small, num_large

    def _trim_heap(self) -> None:
        """Return free memory to the kernel, as glibc keeps what is free between blocks in use.
        Source: malloc_trim(3).
        """
        self._trim = None
        self._num_freed_bytes = 0
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)
