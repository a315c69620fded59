"""The progress of an engine's start, and the reason why one of its processes failed.

vLLM reports both only in its log. This module listens to those loggers and writes lines to a file in memory, whose path
every process of the engine inherits. It relies on the names of vLLM's loggers, never on their texts. Written against
vLLM 0.30 to 0.33.
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

# The first line of one of these loggers begins the stage.
BEGINS = {
    "vllm.v1.worker.cpu_model_runner": "weights",
    "vllm.v1.worker.gpu_model_runner": "weights",
    "vllm.v1.worker.gpu.model_runner": "weights",
    "vllm.model_executor.model_loader.default_loader": "kv cache",  # vLLM measures its size, then allocates it
    "vllm.compilation.decorators": "compilation",
    "vllm.v1.core.kv_cache_utils": "kernels",  # vLLM captures and warms them up
}
SAID_AT_DEBUG = frozenset({"vllm.compilation.decorators"})  # these lines are only for this module
STAGES = tuple(dict.fromkeys(BEGINS.values()))
REPORTING_FAILURE = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
STARTED = "started"


def listen() -> None:
    """Start writing down what vLLM's loggers report in this process."""
    for name in BEGINS:
        logging.getLogger(name).addFilter(_note_stage)
    for name in REPORTING_FAILURE:
        logging.getLogger(name).addFilter(_note_failure)


class StartupLog:
    """A file with lines `stage NAME`, `failed CAUSE` and, at the end of a start, `started`."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def begin(cls) -> StartupLog:
        """Make a new log for this process and for those that it starts from now on."""
        fd = os.memfd_create("startup-log", os.MFD_CLOEXEC)
        os.environ[ENVIRONMENT_NAME] = path = f"/proc/{os.getpid()}/fd/{fd}"
        return cls(path)

    @classmethod
    def current(cls) -> StartupLog:
        """The latest log of this process or of the one that started it. Without one, lines are dropped."""
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
        """The first failure, which caused the others."""
        causes = (line.removeprefix("failed ") for line in self.lines() if line.startswith("failed "))
        return next(causes, None)

    @contextmanager
    def reported_to(self, progress: Progress) -> Iterator[None]:
        """While this is open, a thread reports each stage that begins to `progress`."""
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
    """Write the cause of a failed start. Its line is logged only at DEBUG, because the parent reports the cause."""
    startup_log = StartupLog.current()
    if not record.exc_info or startup_log.is_started:
        return True
    error = record.exc_info[1]
    startup_log.write(f"failed {_described(getattr(error, 'cause', None) or error)}")  # Ray wraps the error of a rank
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _described(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {shorten(str(error), MAX_CAUSE)[1:-1]}"
