"""What a front end leaves behind if it cannot use the model while the server starts: the reason and an exit code."""

from __future__ import annotations

import logging

from gunicorn.arbiter import Arbiter  # type: ignore[import-untyped]

from lmi.errors import StartError
from lmi.runtime import ServerRuntime
from lmi.shared.files import write_whole

log = logging.getLogger(__name__)


def explain(runtime: ServerRuntime, error: Exception) -> int:
    """Write the reason to a file for the supervisor. Returns the exit code, which ends the gunicorn master too."""
    if not isinstance(error, StartError):
        log.error("the front end failed as it started", exc_info=error)
    try:
        write_whole(runtime.front_end_failure(), describe(error).encode(errors="replace"))
    except OSError:  # a full disk
        log.error("the front end cannot start: %s", describe(error))
    code: int = Arbiter.APP_LOAD_ERROR if isinstance(error, StartError) else Arbiter.WORKER_BOOT_ERROR
    return code


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
