"""The far end of an agent: starts the engine process where a launcher runs it, as the supervisor would.

    python -m lmi.engine.far_end SOCKET ENGINE-COMMAND...

A launcher may close descriptors, and keep the exit code of its command to itself. So the agent sends the descriptors of
log and output over the socket, and signals as bytes, and gets the exit code. If the socket closes, the agent is dead,
and everything in this session, which the launcher leads, is killed. The engine leads a process group, so what the
launcher sends to the group of its command does not reach it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from lmi.shared import linux

WAIT_S = 60.0  # a signal, the death of the engine and the socket each end the wait
NUM_FDS = 2  # of the log, and of the output


def main() -> None:
    path, *argv = sys.argv[1:]
    linux.set_title("lmi-far-end")
    signals = linux.Signals()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        try:
            link.connect(path)
            log_fd, output_fd = socket.recv_fds(link, 1, NUM_FDS)[1]
        except (OSError, ValueError):  # ValueError: closed, so no descriptors came
            end_session()
        pid = _start(argv, log_fd, output_fd)
        code = _watch(pid, signals, link)
        try:
            link.send(str(code).encode())
        except OSError:
            end_session()
    sys.exit(code if code >= 0 else 128 - code)


def _start(argv: list[str], log_fd: int, output_fd: int) -> int:
    os.dup2(log_fd, 2)
    score = int(Path("/proc/self/oom_score_adj").read_text())
    pid = linux.spawn(argv, os.environ, death_signal=signal.SIGKILL, oom_score=score, output_fd=output_fd)
    os.close(log_fd)
    os.close(output_fd)
    return pid


def _watch(pid: int, signals: linux.Signals, link: socket.socket) -> int:
    """Pass signals on until the engine ends. Returns its exit code, or the negative number of a signal."""
    link.setblocking(False)
    while True:
        signals.wait(WAIT_S, [link.fileno()])  # what the launcher sends is not for the engine
        try:
            while numbers := link.recv(16):
                for number in numbers:
                    linux.send(pid, signal.Signals(number))
            linux.send(pid, signal.SIGKILL, to_group=True)
            end_session()
        except BlockingIOError:
            pass
        for ended, code in linux.reap():
            if ended == pid:
                return code


def end_session() -> None:
    """Kill every other process of this session and end."""
    linux.kill_session(os.getsid(0))
    os._exit(1)


if __name__ == "__main__":
    main()
