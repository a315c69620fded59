"""Tries again what may pass: a network that fails, a server that is busy, bytes that arrived wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmi.errors import ModelUnusable, SourceUnreachable

DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # between five tries
NO_BYTE_S = 60.0  # without one byte a try has failed
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})

log = logging.getLogger(__name__)

T = TypeVar("T")


class MayPass(Exception):
    """A try failed for a reason that may pass: a connection, a name that is not found, a time-out, 429 or 5xx."""


class Damaged(Exception):
    """What arrived is not what was promised: its size, its MD5, or the object changed while it was read."""

    def __init__(self, what: str, *, wanted: object, found: object) -> None:
        super().__init__(f"{what}: wanted {wanted}, found {found}")


def attempt(once: Callable[[], T], source: object, delays_s: Sequence[float] = DELAYS_S) -> T:
    """Return what `once` returns. It is called again after each delay if it raises MayPass, and once after Damaged.

    Raises SourceUnreachable with the last cause, or ModelUnusable if it was Damaged twice.
    """
    num_damaged, waits = 0, list(delays_s)
    while True:
        try:
            return once()
        except MayPass as error:
            if not waits:
                raise SourceUnreachable(f"{source}: {error} ({len(delays_s) + 1} tries)") from error
            log.warning("%s: %s; the next try is in %g s", source, error, waits[0])
            time.sleep(waits.pop(0))
        except Damaged as error:
            num_damaged += 1
            if num_damaged == 2:
                raise ModelUnusable(f"{source}: {error}, twice") from error
            log.warning("%s: %s; it is fetched once more", source, error)
