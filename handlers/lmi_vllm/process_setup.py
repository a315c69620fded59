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
from typing import NamedTuple

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
# The variable that tells the processes of vLLM how to log.
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


class LogForm(NamedTuple):
    """How a process logs."""

    # What its lines begin with.
    role: str = "engine"
    level: str = "INFO"
    # text, json or auto.
    form: str = "auto"
    # The file, as another process opens it.
    path: str = "/proc/self/fd/2"


def prepare(config: EngineConfig | None = None) -> None:
    """Prepare this process. Call it before the first import of vllm.

    Variables that the user has set stay.
    """
    variables = dict(ENVIRONMENT)
    if is_on_cpu():
        options = config.options if config else {}
        variables |= compiler_variables(options)

    for name, value in variables.items():
        os.environ.setdefault(name, value)

    forget_variables()
    hide_foreign_builds()
    # So this module becomes the main module of a spawned child.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)

    _hand_on_log()
    start_tracker()
    vllm_log.listen()
    _set_levels()


def forget_variables() -> None:
    """Let vLLM read its variables anew: the first engine of a process keeps them for all others."""
    envs = sys.modules.get("vllm.envs")
    if envs is not None:
        envs.disable_envs_cache()


def _hand_on_log() -> None:
    """Tell the processes that vLLM starts how this one logs, if it does as a server."""
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, LineHandler):
            form = LogForm(
                role=handler.formatter.role,
                level=logging.getLevelName(root.level),
                form="json" if handler.formatter.render is as_json else "text",
                path=f"/proc/{os.getpid()}/fd/{fd()}",
            )
            os.environ[LOG_NAME] = json.dumps(form._asdict())


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
    """Let Python not look for garbage. The import of vllm makes none, and the search takes a sixth
    of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def calm_torch() -> None:
    """Import torch, and let its warnings go to lmi's log.

    By itself it writes them to standard error, in its own form.
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
    """Set the levels of vLLM's loggers.

    VLLM_LOGGING_LEVEL counts, if it is set. Else they show INFO where lmi's level is DEBUG, and
    warnings elsewhere. The loggers whose lines tell the stages of a start are heard in any case.
    """
    variable = os.environ.get("VLLM_LOGGING_LEVEL")
    root_level = logging.getLogger().level
    shows_info = root_level <= logging.DEBUG
    default = logging.INFO if shows_info else max(root_level, logging.WARNING)
    logging.getLogger("vllm").setLevel(variable or default)
    if variable is not None or shows_info:
        return

    for name in vllm_log.BEGINS:
        is_at_debug = name in vllm_log.SAID_AT_DEBUG
        logging.getLogger(name).setLevel(logging.DEBUG if is_at_debug else logging.INFO)

    for name in CHATTY_ON_CPU if is_on_cpu() else ():
        logging.getLogger(name).setLevel(logging.ERROR)


class _Stderr(io.TextIOBase):
    """The standard error of a child: its lines go to the log at DEBUG, since vLLM logs them too."""

    def __init__(self) -> None:
        # The beginning of a line whose end was not written yet.
        self._line = ""

    def fileno(self) -> int:
        return STDERR

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            stripped = line.rstrip()
            if stripped:
                logging.getLogger("lmi.vllm.stderr").debug("%s", stripped)

        return len(text)


def _open_again(path: str) -> int:
    """Open a file that another process has open, by its path in /proc, for writes that do not
    block. Returns the descriptor.

    Returns standard error if the file cannot be opened, because it is a socket or belongs to
    another user.
    """
    try:
        access = os.O_RDWR if stat.S_ISCHR(os.stat(path).st_mode) else os.O_WRONLY
        return os.open(path, access | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return STDERR


def _in_child() -> None:
    """Prepare a process that vLLM has started, as `prepare` has prepared its parent."""
    linux.die_with_parent(os.getppid(), signal.SIGKILL)
    # The import of vllm comes next. No code of lmi comes after it that could undo this.
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    # This comes before logging is set up, because the parent has logged it.
    hide_foreign_builds()

    of_parent = LogForm(**json.loads(os.environ.get(LOG_NAME, "{}")))
    role = f"{of_parent.role} {multiprocessing.current_process().name}"
    setup(role, of_parent.level, of_parent.form, _open_again(of_parent.path))
    guard_streams()
    sys.stderr = _Stderr()

    # They are about names that torch will drop, and are for vLLM's authors.
    warnings.simplefilter("ignore", FutureWarning)
    vllm_log.listen()
    _set_levels()


if __name__ == "__mp_main__":
    _in_child()
