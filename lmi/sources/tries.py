"""Tries again what may pass: a network that fails, a server that is busy, bytes that arrived wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmi.errors import ModelUnusable, SourceUnreachable

DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # between five tries
MAX_WAIT_S = 300.0  # that another side may ask for
NO_BYTE_S = 60.0  # without one byte a try has failed
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})

log = logging.getLogger(__name__)

T = TypeVar("T")


class MayPass(Exception):
    """A try failed for a reason that may pass: a connection, a name that is not found, a time-out, 429 or 5xx.

    `wait_s` is how long the other side asks to be left alone.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = min(wait_s, MAX_WAIT_S)


class Damaged(Exception):
    """What arrived is not what was promised: its size, its hash, or the object changed while it was read.

    `what` is given where several things are tried together.
    """

    def __init__(self, what: str = "", *, wanted: object, found: object) -> None:
        super().__init__(f"{what}: " * bool(what) + f"wanted {wanted}, found {found}")


def attempt(
    once: Callable[[], T],
    source: object,
    delays_s: Sequence[float] = DELAYS_S,
    *,
    reached: Callable[[], int] = lambda: 0,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what `once` returns. It is called again after each delay if it raises MayPass, and once after Damaged.

    `reached` says how far the tries have come. Whenever one comes farther than all before, the delays begin anew.
    Raises SourceUnreachable with the last cause, or ModelUnusable if it was Damaged twice.
    """
    num_damaged, waits, farthest = 0, list(delays_s), reached()
    while True:
        try:
            return once()
        except MayPass as error:
            if (now := reached()) > farthest:
                waits, farthest = list(delays_s), now
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
