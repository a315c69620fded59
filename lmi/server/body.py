"""Request bodies in a front end: how many bytes of them there may be, and how their memory goes back.

A client may announce what it never sends, so bytes count as they come. They count until their request has ended,
because its prompt is held so long.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from lmi.errors import Overloaded
from lmi.state import FrontEndRecord

SMALL_BODY_BYTES = 64 << 10
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 20


class BodyMemory:
    """The bytes of bodies in one front end, at most `max_bytes`; `record` counts them.

    Small bodies may take an eighth of that on top of it, so that they are served beside large ones.
    """

    def __init__(self, record: FrontEndRecord, max_bytes: int) -> None:
        self._record = record
        self._max_bytes = max_bytes

    def check_room(self, num_new_bytes: int, num_body_bytes: int) -> None:
        """Raise Overloaded if no more bytes may come. `num_body_bytes`: of their body, with them."""
        is_small = num_body_bytes <= SMALL_BODY_BYTES
        limit = self._max_bytes + (self._max_bytes // 8 if is_small else 0)
        if self._record.num_body_bytes + num_new_bytes > limit:
            raise Overloaded(f"request bodies hold the {self._max_bytes} bytes that they may have (max_body_memory)")

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come, or with a negative number those that are gone."""
        self._record.num_body_bytes += num_bytes


def map_large_blocks() -> None:
    """Have the C library map a block of MAPPED_BYTES by itself, so that it goes back to the kernel when it is freed.

    By default glibc learns from the first large body to keep the next ones in its heap, where a small block behind
    them holds them for ever. Source: mallopt(3).
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
