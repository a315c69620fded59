"""What vLLM reports only in its log: the stages of a start, why a process failed, why a structure
was not followed.

Filters on vLLM's loggers hear it, in every process of the engine. They write what concerns a start
to a file in memory, whose path the processes inherit. They rely on the names of loggers, and on a
request's id as the first argument of a line, never on texts.
"""

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

from lmi.errors import shorten
from lmi.executor import Progress

# The variable with the path of the file.
START = "LMI_VLLM_STARTUP_LOG"
LOOK_S = 0.1
MAX_CAUSE_CHARS = 1000
MAX_REFUSAL_CHARS = 300
# So many refusals are noted. Each is read a moment later.
MAX_REFUSALS = 1000

# The first line of one of these loggers begins the stage.
BEGINS = {
    "vllm.v1.worker.cpu_model_runner": "weights",
    "vllm.v1.worker.gpu_model_runner": "weights",
    "vllm.v1.worker.gpu.model_runner": "weights",
    # After the weights vLLM measures the size of the cache, then it allocates the cache.
    "vllm.model_executor.model_loader.default_loader": "kv cache",
    "vllm.compilation.decorators": "compilation",
    # After the cache vLLM captures its kernels and warms them up.
    "vllm.v1.core.kv_cache_utils": "kernels",
}
# Those of them that say it at DEBUG, which nobody else shall see.
SAID_AT_DEBUG = frozenset({"vllm.compilation.decorators"})
STAGES = tuple(dict.fromkeys(BEGINS.values()))
# The loggers that say why a process failed, and why a structure was not followed.
REPORTING_FAILURE = ("vllm.v1.executor.multiproc_executor",)
REPORTING_GUIDES = (
    "vllm.v1.structured_output",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.structured_output.backend_guidance",
)
STARTED = "started"

GUIDE_FIELD = "guided_decoding_params"
GUIDE_RULE = "must be a structure that vLLM can follow"
NO_TEXT = "no text fits it"
# A line of the compiler's code, as in `[04:07:14] /x/regex.cc:83: `.
PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")


class _GuideRefusal(NamedTuple):
    """A sequence that vLLM gave up because of its structure."""

    # vLLM's own id.
    inner_id: str
    cause: str


_refusals: deque[_GuideRefusal] = deque(maxlen=MAX_REFUSALS)


def listen() -> None:
    """Start writing down what vLLM's loggers report in this process, before its first request."""
    for name in BEGINS:
        logging.getLogger(name).addFilter(_note_stage)

    for name in REPORTING_FAILURE:
        logging.getLogger(name).addFilter(_note_failure)

    for name in REPORTING_GUIDES:
        logging.getLogger(name).addFilter(_note_guide)


def _lines(path: str) -> list[str]:
    """Return the lines of a file, or none if it cannot be read."""
    with suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read().splitlines()

    return []


class StartupLog:
    """A file with lines `stage NAME`, `failed CAUSE` and, at the end of a start, `started`."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def new(cls) -> Self:
        """Return a log in memory for this process and those that it starts from now on."""
        fd = os.memfd_create(START, os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        os.environ[START] = path
        return cls(path)

    @classmethod
    def current(cls) -> Self:
        """Return the latest log of this process or of the one that started it.

        Without one, lines are dropped.
        """
        return cls(os.environ.get(START, os.devnull))

    def write(self, line: str) -> None:
        """Append a line, if there is a log."""
        # The owner of the file may be gone.
        with suppress(OSError), open(self.path, "ab", buffering=0) as file:
            file.write(line.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n")

    @property
    def is_started(self) -> bool:
        """Whether the engine has said that it is started."""
        return STARTED in _lines(self.path)

    @property
    def cause(self) -> str | None:
        """The first failure, which caused the others."""
        for line in _lines(self.path):
            if line.startswith("failed "):
                return line.removeprefix("failed ")

        return None

    @contextmanager
    def reported_to(self, progress: Progress) -> Iterator[None]:
        """While this is open, a thread reports each stage that begins to `progress`."""
        is_over = threading.Event()

        def tell() -> None:
            num_told = 0
            while not is_over.wait(LOOK_S):
                num_begun = self._num_begun_stages()
                for stage in STAGES[num_told:num_begun]:
                    progress(stage, 0.0)

                num_told = max(num_told, num_begun)

        thread = threading.Thread(target=tell, name="startup-log", daemon=True)
        thread.start()

        try:
            yield
            self.write(STARTED)
        finally:
            is_over.set()
            thread.join()

    def _num_begun_stages(self) -> int:
        """Return how many stages have begun: up to the last one that has a line."""
        num_begun = 0
        for line in _lines(self.path):
            if line.startswith("stage "):
                stage_number = STAGES.index(line.removeprefix("stage "))
                num_begun = max(num_begun, stage_number + 1)

        return num_begun


def refusal(cause: Exception | str) -> str:
    """Return one line for the client that says why the structure was refused."""
    reason = PLACE.sub("", " ".join(str(cause).split()))
    return f"{GUIDE_RULE}: {shorten(reason, MAX_REFUSAL_CHARS)[1:-1]}"


def cause_of(name: str) -> str | None:
    """Return why vLLM gave up the sequence `name`, or None if its structure was not the cause."""
    for refused in _refusals:
        if refused.inner_id.rpartition("-")[0] == name:
            return refused.cause

    return None


def _note_stage(record: logging.LogRecord) -> bool:
    """Write that a stage of the start has begun. The line is logged as it would be without us."""
    startup_log = StartupLog.current()
    if not startup_log.is_started:
        startup_log.write(f"stage {BEGINS[record.name]}")

    return logging.getLogger().isEnabledFor(record.levelno)


def _note_failure(record: logging.LogRecord) -> bool:
    """Write the cause of a failed start. Its line is logged only at DEBUG, because the parent
    reports the cause.
    """
    startup_log = StartupLog.current()
    if not record.exc_info or startup_log.is_started:
        return True

    error = record.exc_info[1]
    text = shorten(str(error), MAX_CAUSE_CHARS)[1:-1]
    startup_log.write(f"failed {type(error).__name__}: {text}")
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _note_guide(record: logging.LogRecord) -> bool:
    """Note why vLLM ends a request with the word "error". The line is logged only at DEBUG: the
    client reads it.
    """
    values = record.args
    if record.levelno >= logging.ERROR and isinstance(values, tuple) and values:
        inner_id = str(values[0])
        error = record.exc_info[1] if record.exc_info else None
        cause = NO_TEXT
        if error is not None:
            cause = " ".join(str(error).split())

        _refusals.append(_GuideRefusal(inner_id, cause))

    return logging.getLogger().isEnabledFor(logging.DEBUG)
