"""Which signals mean something to a process of ours, and a wait for them.

Source: signal(7).
"""

import os
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

# The wishes that a process ends, by which it ends itself.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# What the kernel or a library sends for a fault of the process itself.
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
# Signals that by default end or stop a process and are no wish to end it, the real-time ones among
# them. A shell, logrotate or a timer sends them to a whole group. Who means something by one
# handles it.
STRAYS = tuple(
    sorted(signal.valid_signals() - {*ENDING, *FAULTS, *HARMLESS, *OF_PYTHON, *UNSTOPPABLE})
)


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


class SignalPipe:
    """Receives signals as bytes in a pipe, so that one call waits for signals, deaths of children
    and the clock.
    """

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
