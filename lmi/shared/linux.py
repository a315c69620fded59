"""Calls by which a process starts others and changes itself: its end, its name, its cores, what the
kernel shows of it.

Sources: prctl(2), proc(5).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lmi.shared.signals import ENDING, SignalPipe, ignore_strays
from lmi.shared.sink import STDERR, STDOUT

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
EXIT_EXEC_FAILED = 127
# _IOLBF of stdio.h.
IOLBF = 1
# The variable that tells a program its descriptor for the log, if that is not standard error.
LOG_FD_NAME = "LMI_LOG_FD"
# The variable that tells its children the process id of the supervisor.
SUPERVISOR_PID = "LMI_SUPERVISOR_PID"
# The variable that tells an engine which replica of its model it is.
REPLICA = "LMI_REPLICA"
# The variable that tells a process the numbers of its cores, with commas between them.
CORES = "LMI_CORES"
# The variable that tells an engine why it has fewer threads than there are cores.
THREADS_WHY = "LMI_THREADS_WHY"

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Let the kernel send `signum` to this process when its parent dies.

    For the kernel the parent is the thread that forked, so a parent must fork from its main thread.
    If the parent died before this call, the signal is raised at once.
    """
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, like PID 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Keep other processes of this user from reading this process's environment and memory in
    /proc.

    Then its files there are root's, and it cannot open some of them itself. A program that it
    executes is readable again.
    """
    _prctl(PR_SET_DUMPABLE, 0)


def set_title(title: str) -> None:
    """Set the name that top and ps show. The kernel keeps 15 characters."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(title[:15])


def set_oom_score(score: int) -> None:
    """Set how soon the kernel kills this process when memory runs out, from -1000 (never) to 1000
    (first).

    A lower score than before needs a privilege. Without it nothing changes.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    oom_score: int = 0,
    become: Callable[[], None] | None = None,
    inherited_fds: Sequence[int] = (),
    folder: str | None = None,
    output_fd: int | None = None,
) -> int:
    """Start a program as leader of a new process group, and return its pid. The program is killed
    when this process dies.

    `become` makes the child a process of another user. `output_fd` becomes the standard output and
    error of the program, which then logs to this process's standard error (`log_fd`).

    A signal of ENDING that comes before the program has begun ends it: this process's handlers,
    which would swallow the signal, are removed before it is let in.

    Call it from a process without threads. `subprocess` would not do, because it would race with a
    supervisor that reaps every child.
    """
    parent_pid = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SignalPipe.HANDLED)
    try:
        pid = os.fork()
    except OSError:
        # Else no signal would reach this process any more.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise

    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # The child does it too, and may be first.
        with suppress(OSError):
            os.setpgid(pid, pid)

        return pid

    # From here on this is the child, which never returns.
    try:
        _leave_parent(mask)
        _set_rights(oom_score, become)
        # The kernel forgets this when a process becomes another user's, so it comes after that.
        die_with_parent(parent_pid, signal.SIGKILL)
        if folder is not None:
            os.chdir(folder)

        for fd in inherited_fds:
            os.set_inheritable(fd, True)

        variables = dict(environ)
        if output_fd is not None:
            variables[LOG_FD_NAME] = str(_redirect_output(output_fd))

        os.execve(argv[0], list(argv), variables)
    except BaseException as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(EXIT_EXEC_FAILED)


def _leave_parent(mask: Iterable[int]) -> None:
    """In a new child, forget the parent's handlers of signals, begin a process group and let in the
    signals that `mask` does not block.

    Strays are ignored before signals are let in, and so from the program's first moment on.
    """
    # The pipe belongs to the parent.
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGPIPE, signal.SIGCHLD, *ENDING):
        signal.signal(signum, signal.SIG_DFL)

    ignore_strays()
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _set_rights(oom_score: int, become: Callable[[], None] | None) -> None:
    """In a new child, set how soon the kernel kills it, hide its memory and change its user."""
    # The parent may hide its memory. Then /proc/self/oom_score_adj is root's here too.
    _prctl(PR_SET_DUMPABLE, 1)
    set_oom_score(oom_score)
    hide_memory()
    if become is not None:
        become()


def _redirect_output(output_fd: int) -> int:
    """Make a descriptor the standard output and error. Returns a descriptor of the former standard
    error, which the program inherits.
    """
    former_stderr = os.dup(STDERR)
    os.set_inheritable(former_stderr, True)
    os.dup2(output_fd, STDOUT)
    os.dup2(output_fd, STDERR)
    return former_stderr


def end_at_once(code: int) -> NoReturn:
    """End this process with an exit code, without waiting for threads of libraries or user code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def log_fd() -> int:
    """Return the descriptor that this process logs to. Call it once.

    From then on, programs that this process starts do not inherit it.
    """
    fd = int(os.environ.pop(LOG_FD_NAME, STDERR))
    if fd != STDERR:
        os.set_inheritable(fd, False)

    return fd


def print_lines_at_once() -> None:
    """Let C code print each line to a pipe at its end, and not only when lines fill 4 KB."""
    stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
    _libc.setvbuf(stdout, None, IOLBF, ctypes.c_size_t(0))


def bind_threads(cores: Sequence[int], pid: int | None = None) -> None:
    """Let every thread of a process, by default this one, run only on these cores.

    Threads that begin later inherit them.
    """
    # An OSError means that the process or a thread of it has ended, or that a core is gone.
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid or 'self'}/task"):
            with suppress(OSError):
                os.sched_setaffinity(int(task), cores)


def keep_to_cores() -> None:
    """Bind the threads of this process to the cores that CORES names, if it names any."""
    cores = os.environ.get(CORES)
    if cores:
        bind_threads([int(core) for core in cores.split(",")])


def process_bytes() -> int:
    """Return the memory of this process, without what it maps from files or shares."""
    # Numbers of pages: of the address space, of those in memory, of those in memory and shared.
    numbers = Path("/proc/self/statm").read_text().split()
    num_resident = int(numbers[1])
    num_shared = int(numbers[2])
    return (num_resident - num_shared) * os.sysconf("SC_PAGE_SIZE")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
