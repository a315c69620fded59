"""What the processes of one engine tell the one that starts them: how far they are, and why one of them failed.

vLLM says both in its log alone. Here the loggers that say so are listened to, by their names and never by their texts,
and lines are written to a file in memory that every process of the engine inherits by its path. Known of vLLM: names of
modules, which are those of its loggers, as of vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lmi.errors import shorten
from lmi.executor import Progress

ENVIRONMENT_NAME = "LMI_VLLM_STARTUP_LOG"
LOOK_S = 0.1
MAX_CAUSE = 1000  # characters

# The first line of a logger that is named here ends the stage before it.
BEGINS = {
    "vllm.v1.worker.cpu_model_runner": "weights",
    "vllm.v1.worker.gpu_model_runner": "weights",
    "vllm.v1.worker.gpu.model_runner": "weights",
    "vllm.model_executor.model_loader.default_loader": "kv cache",  # how large it may be is tried out, then it is made
    "vllm.compilation.decorators": "compilation",
    "vllm.v1.core.kv_cache_utils": "kernels",  # captured, warmed up
}
SAID_AT_DEBUG = frozenset({"vllm.compilation.decorators"})  # lines that go no further than to this module
STAGES = tuple(dict.fromkeys(BEGINS.values()))
REPORTING_FAILURE = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
STARTED = "started"


def listen() -> None:
    """Write down from now on what vLLM's loggers say in this process."""
    for name in BEGINS:
        logging.getLogger(name).addFilter(_note_stage)
    for name in REPORTING_FAILURE:
        logging.getLogger(name).addFilter(_note_failure)


class StartupLog:
    """Lines of `stage NAME`, `failed CAUSE` and, at the end of a start, `started`."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def begin(cls) -> StartupLog:
        """A new one, for this process and for those that it starts from now on."""
        fd = os.memfd_create("startup-log", os.MFD_CLOEXEC)
        os.environ[ENVIRONMENT_NAME] = path = f"/proc/{os.getpid()}/fd/{fd}"
        return cls(path)

    @classmethod
    def current(cls) -> StartupLog:
        """The latest that was begun here or in the process that started this one; without one, nothing is written."""
        return cls(os.environ.get(ENVIRONMENT_NAME, os.devnull))

    def write(self, line: str) -> None:
        with suppress(OSError), open(self.path, "ab", buffering=0) as file:  # its owner may be gone
            file.write(line.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n")

    def lines(self) -> list[str]:
        with suppress(OSError), open(self.path, encoding="utf-8") as file:
            return file.read().splitlines()
        return []

    @property
    def is_started(self) -> bool:
        return STARTED in self.lines()

    @property
    def cause(self) -> str | None:
        """The first failure: those that follow follow from it."""
        causes = (line.removeprefix("failed ") for line in self.lines() if line.startswith("failed "))
        return next(causes, None)

    @contextmanager
    def reported_to(self, progress: Progress) -> Iterator[None]:
        """While this is open, each stage that begins is told to `progress`, on a thread of its own."""
        is_over = threading.Event()

        def tell() -> None:
            reached = -1
            while not is_over.wait(LOOK_S):
                named = [STAGES.index(line.removeprefix("stage ")) for line in self.lines() if line[:6] == "stage "]
                for stage in STAGES[reached + 1 : max(named, default=reached) + 1]:
                    progress(stage, 0.0)
                reached = max([reached, *named])

        thread = threading.Thread(target=tell, name="startup-log", daemon=True)
        thread.start()
        try:
            yield
            self.write(STARTED)
        finally:
            is_over.set()
            thread.join()


def _note_stage(record: logging.LogRecord) -> bool:
    startup_log = StartupLog.current()
    if not startup_log.is_started:
        startup_log.write(f"stage {BEGINS[record.name]}")
    return logging.getLogger().isEnabledFor(record.levelno)


def _note_failure(record: logging.LogRecord) -> bool:
    """A failed start is told once, by whoever started: not here, unless someone debugs."""
    startup_log = StartupLog.current()
    if not record.exc_info or startup_log.is_started:
        return True
    startup_log.write(f"failed {_described(record.exc_info[1])}")
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _described(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {shorten(str(error), MAX_CAUSE)[1:-1]}"
