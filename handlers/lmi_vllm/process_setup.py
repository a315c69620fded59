"""Prepares this process, and those that vLLM starts from it, before vllm is imported.

vLLM reads its environment when it is imported. Its processes are spawned, never forked, and run this module as their
main module. There it hides packages that break an import, sets up logging as in the parent, and makes the process die
with its parent, which vLLM does not ensure.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import warnings
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import resource_tracker
from pathlib import Path

import lmi.shared.log
from handlers.lmi_vllm import compiling, guides, startup_log
from handlers.lmi_vllm.about import NOTHING_IS_SENT
from handlers.lmi_vllm.hidden_packages import hide_foreign_builds
from handlers.lmi_vllm.startup_log import BEGINS, SAID_AT_DEBUG
from lmi.settings.config import EngineConfig
from lmi.shared import linux
from lmi.shared.sink import guard_streams, open_again

ENVIRONMENT = {
    **NOTHING_IS_SENT,
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go through the root logger
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LOG_NAME = "LMI_VLLM_LOG"

# On a CPU these loggers warn at each start about normal facts: no Triton, no tcmalloc, a seed.
CHATTY_ON_CPU = (
    "vllm.config.vllm",
    "vllm.engine.arg_utils",
    "vllm.platforms.cpu",
    "vllm.utils.torch_utils",
    "vllm.v1.worker.cpu_worker",
)


def prepare(config: EngineConfig | None = None) -> None:
    """Prepare this process. Call it before the first import of vllm. Variables that the user has set stay."""
    of_compiler = compiling.environment(config.options if config else {}) if is_on_cpu() else {}
    for name, value in {**ENVIRONMENT, **of_compiler}.items():
        os.environ.setdefault(name, value)
    hide_foreign_builds()
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)  # the main module of a spawned child
    if (settings := lmi.shared.log.settings()) is not None:
        os.environ[LOG_NAME] = json.dumps(settings)
    _start_tracker()
    guides.begin()
    guides.listen()
    startup_log.listen()
    _set_levels()


def is_on_cpu() -> bool:
    """Whether torch is its CPU build, which vLLM's CPU build needs."""
    return version("torch").endswith("+cpu")


def calm_torch() -> None:
    """Send torch's warnings to lmi's log: torch writes them to stderr in its own form. Call this after its import."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "torch":
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that Triton is missing


def _set_levels() -> None:
    """Show vLLM's INFO, which is for its developers, only if lmi's level is DEBUG.

    The progress of a start is shown at INFO. VLLM_LOGGING_LEVEL overrides this.
    """
    asked = os.environ.get("VLLM_LOGGING_LEVEL")
    ours = logging.getLogger().level
    logging.getLogger("vllm").setLevel(asked or (logging.INFO if ours <= logging.DEBUG else max(ours, logging.WARNING)))
    if asked is None and ours > logging.DEBUG:
        for name in BEGINS:
            logging.getLogger(name).setLevel(logging.DEBUG if name in SAID_AT_DEBUG else logging.INFO)
        for name in CHATTY_ON_CPU if is_on_cpu() else ():
            logging.getLogger(name).setLevel(logging.ERROR)


def _start_tracker() -> None:
    """Start Python's tracker of shared memory outside this process group.

    The tracker removes the shared memory that is left once the last process that used it has ended, even if it was
    killed. The SIGKILL that the supervisor sends to the whole group must not reach the tracker. Its warnings about the
    memory that it removes are silenced.
    """
    is_alone = os.getpgrp() == os.getpid() != os.getsid(0)  # the leader of a session cannot leave its group
    if is_alone:
        with suppress(OSError):
            os.setpgid(0, os.getpgid(os.getppid()))
    sys.warnoptions.append("ignore")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()
        if is_alone:
            os.setpgid(0, 0)


def unlink_shared_memory() -> None:
    """Remove the names of the memory that vLLM's C++ code shares between ranks, once all ranks have mapped it.

    No other code removes them when the ranks are killed: Python's tracker does not accept a colon in a name.
    """
    for pid in (os.getpid(), *linux.descendants(os.getpid())):
        with suppress(OSError):
            for path in re.findall(r" (/dev/shm/vllm_\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE):
                os.unlink(path)


class _Stderr(io.TextIOBase):
    """The stderr of a child. vLLM also logs the lines that it prints there, so they go to the log at DEBUG."""

    def __init__(self) -> None:
        self._line = ""

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in filter(None, map(str.rstrip, lines)):
            logging.getLogger("lmi.vllm.stderr").debug("%s", line)
        return len(text)


def _in_child() -> None:
    linux.die_with_parent(os.getppid(), signal.SIGKILL)
    hide_foreign_builds()  # before logging is set up: the parent has logged it
    role, level, format, path = json.loads(os.environ.get(LOG_NAME, '["engine", "INFO", "auto", "/proc/self/fd/2"]'))
    lmi.shared.log.setup(f"{role} {multiprocessing.current_process().name}", level, format, open_again(path))
    guard_streams()
    sys.stderr = _Stderr()
    warnings.simplefilter("ignore", FutureWarning)  # about names that torch will drop, for vLLM's authors
    guides.listen()
    startup_log.listen()
    _set_levels()


if __name__ == "__mp_main__":
    _in_child()
