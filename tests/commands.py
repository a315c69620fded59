"""`lmi` as it is typed, in the process of the test."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

from lmi.cli import run


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def lmi(*words: str) -> Done:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = run(list(words))

    return Done(code, out.getvalue(), err.getvalue())
