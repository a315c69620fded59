"""Prepares this process, and those that vLLM starts from it, before vllm is imported.

vLLM's processes are spawned and run this module as their main module: it hides packages that break
an import, sets up logging as in the parent, and makes the process die with its parent, which vLLM
does not ensure.
"""

import gc
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import signal
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version

from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.about import NOTHING_IS_SENT
from handlers.lmi_vllm.compiling import compiler_variables
from handlers.lmi_vllm.shared_memory import start_tracker
from lmi.settings.config import EngineConfig
from lmi.shared import linux
from lmi.shared.log import LineHandler, as_json, fd, setup
from lmi.shared.sink import STDERR, guard_streams

ENVIRONMENT = {
    **NOTHING_IS_SENT,
    # Its lines go through the root logger.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LOG_NAME = "LMI_VLLM_LOG"
# The CPU build of vLLM needs torch's CPU build, but accepts any version of these. An installer
# picks their CUDA builds, whose import fails beside that torch. vllm and transformers do not need
# them for text, but import those they find.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# The end of a version such as 2.13.0+cpu.
CPU_TAG = "+cpu"
# On a CPU these loggers warn at each start about normal facts: no Triton, no tcmalloc, a seed.
CHATTY_ON_CPU = (
    "vllm.config.vllm",
    "vllm.engine.arg_utils",
    "vllm.platforms.cpu",
    "vllm.utils.torch_utils",
    "vllm.v1.worker.cpu_worker",
)
# A spawned process looks for garbage once it has so many new objects, not 700 as Python has it.
OBJECTS_BEFORE_COLLECTION = 50_000

log = logging.getLogger("lmi.vllm")


def prepare(config: EngineConfig | None = None) -> None:
    """Prepare this process. Call it before the first import of vllm. Variables that the user has
    set stay.
    """
    variables = ENVIRONMENT
    if is_on_cpu():
        options = config.options if config else {}
        variables = {**ENVIRONMENT, **compiler_variables(options)}

    for name, value in variables.items():
        os.environ.setdefault(name, value)

    hide_foreign_builds()
    # So this module becomes the main module of a spawned child.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)

    _hand_on_log()
    start_tracker()
    vllm_log.listen()
    _set_levels()


def _hand_on_log() -> None:
    """Tell the processes that vLLM starts how this one logs, if it does as a server."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            level = logging.getLevelName(logging.getLogger().level)
            form = "json" if handler.formatter.render is as_json else "text"
            path = f"/proc/{os.getpid()}/fd/{fd()}"
            os.environ[LOG_NAME] = json.dumps([handler.formatter.role, level, form, path])


def is_on_cpu() -> bool:
    """Whether torch is its CPU build, which vLLM's CPU build needs."""
    return version("torch").endswith(CPU_TAG)


def hide_foreign_builds() -> None:
    """Hide packages that would break an import of vllm or transformers, before the first one.

    A module that is None in `sys.modules` counts as missing, for imports and for `find_spec`.
    """
    foreign: list[str] = []
    for name in COMPANIONS if is_on_cpu() else ():
        with suppress(PackageNotFoundError):
            build = version(name)
            if not build.endswith(CPU_TAG) and sys.modules.get(name) is None:
                foreign.append(f"{name} {build}")
                sys.modules[name] = None  # type: ignore[assignment]

    if foreign:
        names = ", ".join(foreign)
        log.info("hidden from vllm, not built for torch %s: %s", version("torch"), names)


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Import vllm in it: the import makes no garbage, and the search for it takes a sixth of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def calm_torch() -> None:
    """Import torch, and send its warnings to lmi's log: it writes them to stderr in its
    own form.
    """
    import torch  # noqa: F401

    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "torch":
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True

    # It warns that Triton is missing.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def _set_levels() -> None:
    """Show vLLM's INFO, but for a start's progress, only if lmi's level is DEBUG.
    VLLM_LOGGING_LEVEL overrides it.
    """
    variable = os.environ.get("VLLM_LOGGING_LEVEL")
    our_level = logging.getLogger().level
    shows_info = our_level <= logging.DEBUG
    default = logging.INFO if shows_info else max(our_level, logging.WARNING)
    logging.getLogger("vllm").setLevel(variable or default)
    if variable is not None or shows_info:
        return

    for name in vllm_log.BEGINS:
        is_at_debug = name in vllm_log.SAID_AT_DEBUG
        logging.getLogger(name).setLevel(logging.DEBUG if is_at_debug else logging.INFO)

    for name in CHATTY_ON_CPU if is_on_cpu() else ():
        logging.getLogger(name).setLevel(logging.ERROR)


class _Stderr(io.TextIOBase):
    """The stderr of a child. vLLM also logs the lines that it prints there, so they go to the log
    at DEBUG.
    """

    def __init__(self) -> None:
        self._line = ""

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in filter(None, map(str.rstrip, lines)):
            logging.getLogger("lmi.vllm.stderr").debug("%s", line)

        return len(text)


def _open_again(path: str) -> int:
    """Open, not blocking, a file that another process has open, by its path in /proc. Returns the
    descriptor.

    Returns standard error if the file cannot be opened, because it is a socket or belongs to
    another user.
    """
    try:
        access = os.O_RDWR if stat.S_ISCHR(os.stat(path).st_mode) else os.O_WRONLY
        return os.open(path, access | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return STDERR


def _in_child() -> None:
    linux.die_with_parent(os.getppid(), signal.SIGKILL)
    # The import of vllm comes next. No code of lmi comes after it that could undo this.
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    # This comes before logging is set up, because the parent has logged it.
    hide_foreign_builds()

    text = os.environ.get(LOG_NAME, '["engine", "INFO", "auto", "/proc/self/fd/2"]')
    role, level, form, path = json.loads(text)
    setup(f"{role} {multiprocessing.current_process().name}", level, form, _open_again(path))
    guard_streams()
    sys.stderr = _Stderr()

    # They are about names that torch will drop, and are for vLLM's authors.
    warnings.simplefilter("ignore", FutureWarning)
    vllm_log.listen()
    _set_levels()


if __name__ == "__mp_main__":
    _in_child()
