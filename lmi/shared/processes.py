"""What the kernel tells of processes: who is alive, whose children they are, how they ended.

Sources: waitpid(2), proc(5).
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from lmi.shared.machine import MB, memory_limit

# The unit of the processor times that the kernel tells.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def title(pid: int) -> str:
    """Return the name that top and ps show of a process, or "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")

    return ""


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
    """Return how a process ended, as the end of a sentence about it."""
    if code >= 0:
        return f"exited with code {code}"

    # A real-time signal has no name.
    is_named = -code in [*signal.Signals]
    name = signal.Signals(-code).name if is_named else f"signal {-code}"
    hint = _hint_of_memory() if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _hint_of_memory() -> str:
    limit = memory_limit()
    allowed = ""
    if limit.source:
        allowed = f" ({limit.num_bytes // MB} MB are allowed here: {limit.source})"

    return f", which the kernel also does when memory runs out{allowed}"
