"""Starts the console script as the entry point of an image does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.served import QUIET, Server

BIN = Path(sys.executable).parent


@contextmanager
def started(folder: Path, words: list[str], **environ: str) -> Iterator[Server]:
    """The console script `lmi` with these words, in the model's folder, as an image's entry point
    runs it.
    """
    server = Server(folder, folder.parent / "log")
    environ = {**os.environ, **QUIET, "SAGEMAKER_BIND_TO_PORT": str(server.port), **environ}
    with server.log.open("wb") as log:
        command = [str(BIN / "lmi"), *words]
        server.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)

    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)
