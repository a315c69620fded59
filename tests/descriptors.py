"""So many open descriptors that a further one has a number that `select` refuses, or is refused
itself.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_REFUSED = 1024  # FD_SETSIZE


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Open descriptors up to FIRST_REFUSED. Until the block ends this process may have twice as
    many.
    """
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FIRST_REFUSED), hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < FIRST_REFUSED:
            opened.append(os.open(os.devnull, os.O_RDONLY))

        yield
    finally:
        for fd in opened:
            os.close(fd)

        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Until the block ends this process opens no file: EMFILE, as where clients hold all
    descriptors.
    """
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
