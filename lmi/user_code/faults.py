"""Exceptions of user code, as text for error messages."""

from __future__ import annotations

import traceback

from lmi.errors import writable


def describe(error: BaseException) -> str:
    """Return the last line of the traceback. Bytes in it that are not UTF-8 are replaced, so that it can be sent."""
    return writable(traceback.format_exception_only(error)[-1].strip())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the process or of an accelerator ran out. Libraries name their class OutOfMemoryError."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def line_number(error: BaseException, path: str) -> int | None:
    """Return the line of the file at `path` that raised, None if the traceback does not name one."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None
