"""Memory from the system, in pages of a size that is advised: huge ones for weights and buffers,
where the system has them, small ones for blocks.

It is taken when it is first written.
"""

import mmap

import numpy as np

from handlers.lmi_dist.arrays import Array

# An array of an arena begins at a multiple of so many bytes.
ALIGNMENT = 64


def map_memory(num_bytes: int, pages: int) -> mmap.mmap:
    """Return zeroed bytes in pages of the size that is advised. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {num_bytes} bytes: {error}") from error

    try:
        memory.madvise(pages)
    except OSError:
        # This kernel has no huge pages.
        pass

    return memory


def allocate(num_bytes: int, pages: int = mmap.MADV_HUGEPAGE) -> Array:
    """Return zeroed bytes, (num_bytes,), in pages of the size that is advised. Raises
    MemoryError.
    """
    return np.frombuffer(map_memory(num_bytes, pages), np.uint8)


class Arena:
    """Memory for many arrays, one behind the other, so that small ones lie in huge pages too."""

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        """`chunk_bytes` are taken from the system at a time, or more for a larger array."""
        self._chunk_bytes = chunk_bytes
        self._chunk = allocate(0)
        self._num_taken = 0

    def take(self, num_bytes: int) -> Array:
        """Return bytes, (num_bytes,), whose address is a multiple of ALIGNMENT. They live as long
        as the array.
        """
        if self._num_taken + num_bytes > self._chunk.size:
            self._chunk = allocate(max(num_bytes, self._chunk_bytes))
            self._num_taken = 0

        start = self._num_taken
        end = start + num_bytes
        self._num_taken = -(-end // ALIGNMENT) * ALIGNMENT
        return self._chunk[start:end]
