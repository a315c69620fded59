"""A file in memory, and so on no disk, for the processes that inherit its descriptor. Source:
memfd_create(2).

One process writes it, always as a whole. A reader that comes in between sees so by the digest, and
reads again.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

DIGEST_BYTES = hashlib.sha256().digest_size
# The longest wait of a reader: a write takes less than a millisecond.
READ_S = 1.0


class MemoryFile:
    """A file in memory, which one process writes and others read."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls, name: str, data: bytes) -> Self:
        """Make the file. Its name is for /proc only. Raises OSError where there is no descriptor or
        memory for it.
        """
        file = cls(os.memfd_create(name, os.MFD_CLOEXEC))
        file.write(data)
        return file

    def write(self, data: bytes) -> None:
        """Replace what the file holds. A reader gets the old data or the new."""
        whole = hashlib.sha256(data).digest() + data
        os.pwrite(self.fd, whole, 0)
        os.ftruncate(self.fd, len(whole))

    def read(self) -> bytes:
        """Return what was written last. Raises OSError if it does not come whole."""
        deadline_s = time.monotonic() + READ_S
        while True:
            whole = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
            digest = whole[:DIGEST_BYTES]
            data = whole[DIGEST_BYTES:]
            if hashlib.sha256(data).digest() == digest:
                return data

            if time.monotonic() > deadline_s:
                raise OSError("a file in memory was written in part only")

            time.sleep(0.001)


@contextmanager
def path_of(data: bytes) -> Iterator[str]:
    """Yield a path at which this process finds the data, for a library that opens only paths."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)

        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
