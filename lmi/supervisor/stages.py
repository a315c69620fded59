"""What happens before a model's processes start: what must hold is checked, then the stages of the
start run.

Each stage is a child that ends by itself: the fetch of the model, then its requirements. The
supervisor runs it until its child is done, then asks for the next one.
"""

import fcntl
import logging
import os
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from lmi.errors import BadConfiguration, StartError
from lmi.runtime import URL, Runtime, ServerRuntime, cannot_write
from lmi.settings.config import Config, ServerConfig
from lmi.settings.resolve import Resolved
from lmi.settings.start import Fetched
from lmi.settings.user import User
from lmi.shared.linux import SUPERVISOR_PID
from lmi.shared.machine import MB, PROC, memory_limit, num_free_tasks
from lmi.shared.state import SupervisorRecord
from lmi.sources import fetches
from lmi.supervisor.child import Child, ChildKind
from lmi.supervisor.kinds import environ_of_child, environ_of_pip
from lmi.supervisor.restarts import RestartTable

# A front end reserves 40, the others are for clients.
MIN_OPEN_FILES = 64
# The gunicorn master, and two for what comes and goes; a front end has a thread, an engine one that
# steps.
NUM_OWN_TASKS = 3
NUM_TASKS_EACH = 2
# With less, a server of the engine echo without a model is killed while it starts.
MIN_MEMORY = 64 * MB
# The deaths of one stage by signals or faults of ours; each try goes on where the last one ended.
MAX_DEATHS = 3

Settle = Callable[[Fetched], Resolved]
"""Resolves the settings again, with the folders of the sources that were fetched."""

log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows. Raises StartError if that is too
    few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_OPEN_FILES:
        raise StartError(
            f"a server needs {MIN_OPEN_FILES} open files in each process, and only {most} are "
            "allowed here (`ulimit -Hn`, RLIMIT_NOFILE)"
        )

    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_task_limit(num_front_ends: int, num_engines: int, proc: Path = PROC) -> None:
    """Raise StartError if this server could not start its processes with their threads."""
    num_needed = NUM_OWN_TASKS + NUM_TASKS_EACH * (num_front_ends + num_engines)
    num_free = num_free_tasks(proc)
    if num_free is not None and num_free < num_needed:
        raise StartError(
            f"a server needs {num_needed} more processes and threads, and only {num_free} may be "
            "started here (pids.max of a control group, `ulimit -u`, RLIMIT_NPROC)"
        )


def check_memory(proc: Path = PROC) -> None:
    """Raise StartError if no server fits into the memory that this process may use."""
    limit = memory_limit(proc)
    if limit.num_bytes < MIN_MEMORY:
        raise StartError(
            f"a server needs {MIN_MEMORY // MB} MB of memory beside its model, and only "
            f"{limit.num_bytes // MB} MB are allowed here ({limit.source or 'the whole machine'})"
        )


def check_user(user: User, runtime: ServerRuntime) -> None:
    """Raise BadConfiguration unless children may become the user, and can then use what front ends
    open.
    """
    if os.geteuid() != 0:
        raise BadConfiguration(
            f"option.user={user}: only root may start processes as another user, and this is user "
            f"{os.geteuid()}"
        )

    needed = {sys.executable: os.X_OK, str(runtime.path): os.W_OK | os.X_OK}
    # The child answers by its exit code: 0 if all is well, 1 if it cannot become the user, or 2 and
    # more for the place of the path that it cannot use.
    pid = os.fork()
    if pid == 0:
        try:
            user.become()
            for code, (path, mode) in enumerate(needed.items(), 2):
                if not os.access(path, mode):
                    os._exit(code)

            os._exit(0)
        finally:
            os._exit(1)

    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not code:
        return

    reason = "root needs the capabilities CHOWN, DAC_OVERRIDE, KILL, SETGID and SETUID for this"
    if code > 1:
        reason = f"that user cannot use {list(needed)[code - 2]}"

    raise BadConfiguration(f"option.user={user}: {reason}")


def remove_leftovers() -> None:
    """Remove the runtime folders of this user whose server no longer runs, because it
    was killed.
    """
    for folder in Path(tempfile.gettempdir()).glob("lmi-*"):
        # An OSError: it has no such file, or its server holds the lock.
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue

            with open(folder / URL, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                log.info("removed %s, which a killed server had left", folder)


class Stage(Child):
    """A child that does one thing and reports in `folder`. `words` are its module and command.

    It has the secrets that `environ` leaves of this process's environment, by default all.
    """

    def __init__(
        self,
        title: str,
        folder: Path,
        config: ServerConfig,
        *words: str,
        environ: Callable[[Mapping[str, str]], Mapping[str, str]] = dict,
    ) -> None:
        log_words = ["--log-level", config.log_level, "--log-format", config.log_format]

        def environ_of_stage(slot: int) -> dict[str, str]:
            return environ_of_child(environ(os.environ)) | {SUPERVISOR_PID: str(os.getpid())}

        kind = ChildKind(
            title=title,
            argv=lambda slot: [sys.executable, "-P", "-m", *words, *log_words],
            environ=environ_of_stage,
            output_logger="libraries",
            restarts=lambda: RestartTable(MAX_DEATHS, window_s=float("inf")),
            fatal=self.fatal,
            lost_label=StartError.label,
            is_one_shot=True,
        )
        super().__init__(kind)
        self.folder = folder

    def fatal(self, code: int, reason: str) -> StartError | None:
        """Return the error that an exit means if another start cannot mend it."""
        return fetches.failure(self.folder)

    def show_in(self, record: SupervisorRecord) -> None:
        """Write how far the stage is to where `/ping` reads it."""
        report = fetches.read(self.folder / fetches.PROGRESS, fetches.FetchReport)
        record.stage = self.name
        record.progress = 0.0 if report is None else report.share


def stages(resolved: Resolved, settle: Settle, runtime: ServerRuntime) -> Iterator[Stage | Config]:
    """Yield each stage of a start that is needed, then the settings of the model, unless clients
    name the models.

    Raises StartError for settings that the fetched files make impossible.
    """
    if runtime.config.multi_model:
        return

    if resolved.request is not None:
        folder = _new_folder(runtime, "download")
        fetches.write(folder / fetches.REQUEST, resolved.request)
        log.info("fetching %s", ", ".join(source.source for source in resolved.request.sources))
        yield Stage("download", folder, resolved.config.server, *fetch_words(folder))
        folders = fetches.result(folder)
        if folders is None:
            raise StartError(f"the fetch process left no {fetches.RESULT}")

        resolved = settle(folders)
        say(resolved)

    stage = requirements(resolved.config, runtime)
    if stage is not None:
        yield stage

    yield resolved.config


def fetch_words(folder: Path) -> tuple[str, ...]:
    """Return the module and the command of a process that fetches what the request in a folder
    names.
    """
    return "lmi.sources.worker", str(folder / fetches.REQUEST), str(folder)


def requirements(config: Config, runtime: ServerRuntime | Runtime) -> Stage | None:
    """Return the stage that installs what the model's code needs, or None if it is there. It
    reports in `runtime`.
    """
    needed = config.requirements
    if needed is None or Path(needed.folder).is_dir():
        return None

    folder = _new_folder(runtime, "requirements")
    log.info("installing what %s names", needed.label)
    places = ["--file", needed.file, "--folder", needed.folder, "--state", str(folder)]
    words = ["lmi.user_code.requirements", *places]
    if needed.has_words:
        words.append("--with-words")

    user = config.server.user
    if user is None:
        return Stage("requirements", folder, config.server, *words)

    words += ["--user", str(user)]
    environ = partial(environ_of_pip, user=user)
    return Stage("requirements", folder, config.server, *words, environ=environ)


def say(resolved: Resolved) -> None:
    texts_of_levels = {
        logging.DEBUG: resolved.details,
        logging.INFO: resolved.notes,
        logging.WARNING: resolved.warnings,
    }
    for level, texts in texts_of_levels.items():
        for text in texts:
            log.log(level, "%s", text)


def _new_folder(runtime: ServerRuntime | Runtime, name: str) -> Path:
    folder = runtime.path / name
    try:
        folder.mkdir()
    except OSError as error:
        raise cannot_write(folder, error) from error

    return folder
