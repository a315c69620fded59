"""What Linux does with processes: start and end, signals, names, cores.

Sources: prctl(2), waitpid(2), proc(5).
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lmi.shared.sink import STDERR, STDOUT

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
EXIT_EXEC_FAILED = 127
# _IOLBF of stdio.h.
IOLBF = 1
# The unit of the processor times that the kernel tells.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOG_FD_NAME = "LMI_LOG_FD"
# The variable that names the supervisor to its children.
SUPERVISOR_PID = "LMI_SUPERVISOR_PID"
# The variable that tells an engine which replica of its model it is.
REPLICA = "LMI_REPLICA"
# The variable that names its cores to a process.
CORES = "LMI_CORES"
# The variable that says why an engine has fewer threads than there are cores.
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

    Its files there belong to root then, so that it cannot open some of them itself. A program that
    it starts is readable again.
    """
    _prctl(PR_SET_DUMPABLE, 0)


def set_title(title: str) -> None:
    """Set the name that top and ps show. The kernel keeps 15 characters."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(title[:15])


def title(pid: int) -> str:
    """Return the name that top and ps show of a process, or "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")

    return ""


def set_oom_score(score: int) -> None:
    """Set how soon the kernel kills this process when memory runs out, from -1000 (never) to 1000
    (first).

    A lower score than before needs a privilege. Without it nothing changes.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
FAULTS = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGSYS,
    signal.SIGTRAP,
)
# By default these do nothing.
HARMLESS = (
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGURG,
    signal.SIGWINCH,
)
# Python ignores these.
OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
UNSTOPPABLE = (signal.SIGKILL, signal.SIGSTOP)
STRAYS = tuple(
    sorted(signal.valid_signals() - {*ENDING, *FAULTS, *HARMLESS, *OF_PYTHON, *UNSTOPPABLE})
)
"""Signals that by default end or stop a process and are no wish to end it, the real-time ones among
them.

A shell, logrotate or a timer sends them to a whole group. Who means something by one handles it.
"""


def ignore_strays(*handled: signal.Signals) -> None:
    """Ignore STRAYS but `handled`. What this process starts ignores them too."""
    for signum in STRAYS:
        if signum not in handled:
            signal.signal(signum, signal.SIG_IGN)


def of_terminal() -> tuple[signal.Signals, ...]:
    """Return the signals by which a terminal ends or stops what runs in its foreground, if this
    process has one.
    """
    return (signal.SIGHUP, signal.SIGTSTP) if sys.stderr.isatty() else ()


class Signals:
    """Receives signals as bytes in a pipe, so that one call waits for signals, deaths of children
    and the clock.
    """

    ENDING = ENDING
    HANDLED = (*ENDING, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        ignore_strays(*self.HANDLED, *of_terminal())
        for signum in self.HANDLED:
            signal.signal(signum, lambda signum, frame: None)

    def wait(self, timeout_s: float, readers: Sequence[int] = ()) -> list[signal.Signals]:
        """Return the signals that came, at once when one comes or when one of `readers` can be
        read.
        """
        is_any_readable([self._reader, *readers], timeout_s)
        with suppress(BlockingIOError):
            return [signal.Signals(number) for number in os.read(self._reader, 4096)]

        return []


def is_any_readable(fds: Iterable[int], timeout_s: float = 0.0) -> bool:
    """Wait until one of these descriptors has data or has come to its end, and return whether one
    has.

    The descriptor of a process has come to its end with the process. `select` refuses descriptors
    from 1024 on.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)

    return bool(poll.poll(timeout_s * 1000))


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
    """Start a program as leader of a new process group, which dies with this process, and return
    its pid.

    `become` makes the process one of another user. `output_fd` becomes its standard output and
    error. `log_fd` then returns, in the program, the standard error of this process. It does not
    use `subprocess`, which would race with a supervisor that reaps every child. Call it from a
    process without threads. A signal of ENDING that comes before the program has begun ends it: the
    handlers of this process, which would swallow it, are away before it is let in.
    """
    parent_pid = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, Signals.HANDLED)
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

    try:
        # The pipe belongs to the parent.
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        for signum in (signal.SIGPIPE, signal.SIGCHLD, *ENDING):
            signal.signal(signum, signal.SIG_DFL)

        # Before signals come in: the program is to ignore strays from its first moment.
        ignore_strays()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # While a process hides its memory, its /proc/self/oom_score_adj is root's.
        _prctl(PR_SET_DUMPABLE, 1)
        set_oom_score(oom_score)
        hide_memory()
        if become is not None:
            become()

        die_with_parent(parent_pid, signal.SIGKILL)
        if folder is not None:
            os.chdir(folder)

        for fd in inherited_fds:
            os.set_inheritable(fd, True)

        if output_fd is not None:
            # The former standard error.
            log_fd = os.dup(STDERR)
            os.set_inheritable(log_fd, True)
            os.dup2(output_fd, STDOUT)
            os.dup2(output_fd, STDERR)
            environ = {**environ, LOG_FD_NAME: str(log_fd)}

        os.execve(argv[0], list(argv), dict(environ))
    except BaseException as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(EXIT_EXEC_FAILED)


def end_at_once(code: int) -> NoReturn:
    """End this process with an exit code. Threads of a library or of user code do not delay it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def log_fd() -> int:
    """Return the descriptor that this process logs to. Call it once: what this process starts
    inherits none of it.
    """
    fd = int(os.environ.pop(LOG_FD_NAME, STDERR))
    if fd != STDERR:
        os.set_inheritable(fd, False)

    return fd


def print_lines_at_once() -> None:
    """Let C code that prints to a pipe write each line when it ends. By default lines wait until
    they fill 4 KB.
    """
    stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
    _libc.setvbuf(stdout, None, IOLBF, ctypes.c_size_t(0))


def reap() -> list[tuple[int, int]]:
    """Return pid and exit code of each ended child, also of adopted ones. A negative code is a
    signal's number.
    """
    ended = list[tuple[int, int]]()
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break

            ended.append((pid, os.waitstatus_to_exitcode(status)))

    return ended


def send(pid: int, signum: signal.Signals, *, to_group: bool = False) -> None:
    """Send a signal to a process or its whole group. Does nothing if it has ended."""
    kill = os.killpg if to_group else os.kill
    with suppress(ProcessLookupError):
        kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Return whether a process is left, even one that has ended and is not reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass

    return True


def children() -> list[int]:
    """Return the pids of this process's children, also of adopted ones."""
    return _children().get(os.getpid(), [])


def descendants(*pids: int) -> list[int]:
    """Return the pids of the processes that these have started, and that those have started."""
    children = _children()
    family = list(pids)
    # The list grows meanwhile.
    for parent in family:
        family += children.get(parent, [])

    return family[len(pids) :]


def _children() -> dict[int, list[int]]:
    """Return the pids of every process's children. The kernel's own list of them misses some while
    others end.
    """
    children: dict[int, list[int]] = {}
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    for pid in pids:
        # An OSError means that the process has ended.
        with suppress(OSError):
            fields = _fields_of_stat(Path(f"/proc/{pid}/stat"))
            parent = int(fields[1])
            children.setdefault(parent, []).append(pid)

    return children


def processor_times(pid: int) -> dict[int, float]:
    """Return the seconds that each thread of a process and of its descendants has computed, by the
    thread's id.

    Threads that end meanwhile are left out. Source: proc(5), utime and stime of
    /proc/PID/task/TID/stat.
    """
    times: dict[int, float] = {}
    for process in [pid, *descendants(pid)]:
        # An OSError means that the process or the thread has ended.
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with suppress(OSError):
                    fields = _fields_of_stat(Path(f"/proc/{process}/task/{thread}/stat"))
                    in_user, in_system = fields[11:13]
                    times[int(thread)] = (int(in_user) + int(in_system)) / TICKS_PER_S

    return times


def _fields_of_stat(path: Path) -> list[str]:
    """Return the fields behind the name, which may hold spaces and ")"."""
    return path.read_text().rpartition(")")[2].split()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"

    # A real-time signal has no name.
    is_named = -code in [*signal.Signals]
    name = signal.Signals(-code).name if is_named else f"signal {-code}"
    hint = ", which the kernel also does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def bind_threads(cores: Sequence[int], pid: int | None = None) -> None:
    """Let every thread of a process, of this one by default, run only on these cores. Later threads
    inherit them.
    """
    # An OSError means that the process or a thread of it has ended, or that a core is gone.
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid or 'self'}/task"):
            with suppress(OSError):
                os.sched_setaffinity(int(task), cores)


def keep_to_cores() -> None:
    """Bind every thread of this process, and those that they start, to the cores that its
    environment names.
    """
    cores = os.environ.get(CORES)
    if cores:
        bind_threads([int(core) for core in cores.split(",")])


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
