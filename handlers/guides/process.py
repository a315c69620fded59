"""The process that compiles guides before the engine does: a compilation cannot be stopped
otherwise.

It has read the vocabulary once and forks for each guide, which comes over a connection of its own.
The kernel ends a fork that reaches a limit; the engine knows it by the missing answer. The engine
imports this module too, without llguidance.
"""

import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import BinaryIO

import msgspec

from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams
from lmi.shared import linux, machine

# So many compilations run at a time.
MAX_COMPILATIONS = 4
# The processor time of a compilation.
MAX_CPU_S = 2
# Its time by the clock, on a machine that gives the process little time.
MAX_COMPILE_S = 15.0
# The memory of all compilations together, which is at most an eighth of the container's.
MAX_MEMORY_BYTES = 1 << 30
# A longer answer is not sent.
MAX_TEXT_BYTES = 16 << 20

COMPILED = b"+"
REFUSED = b"-"
# A message that asks for nothing. Its answer is COMPILED.
PROBE = b""

# The stack of a compilation. It is smaller than the engine's, so that a guide that would overflow
# that one overflows this one.
STACK_BYTES = 64 << 20
# The engine's step goes first.
NICENESS = 5
PAGE_BYTES = resource.getpagesize()

Compile = Callable[[GuidedDecodingParams], str]
"""Makes the engine's text of a guide. Raises ValueError for one that cannot be compiled."""


def max_compile_bytes() -> int:
    """Return the bytes of memory that one compilation may take."""
    return min(MAX_MEMORY_BYTES, machine.memory_bytes() // 8) // MAX_COMPILATIONS


class Start(msgspec.Struct):
    """What the process reads first."""

    # The width of the logits.
    vocab_size: int
    # The time of a guide by the clock.
    max_compile_s: float = MAX_COMPILE_S
    # Whether JSON has no spaces between its values.
    is_compact: bool = True
    # A module whose `new_compile` takes this record and returns a Compile.
    compiler: str = "handlers.guides.text"
    # For the compiler alone.
    backends: tuple[str, ...] = ()
    # The processor time of a guide.
    max_cpu_s: int = MAX_CPU_S
    # The memory of a guide.
    max_bytes: int = msgspec.field(default_factory=max_compile_bytes)
    # The vocabulary, which is read with the first guide.
    config: GuidedDecodingConfig = GuidedDecodingConfig([])


def read_all(connection: socket.socket) -> bytes:
    """Read up to the end of the stream."""
    parts: list[bytes] = []
    while part := connection.recv(1 << 16):
        parts.append(part)

    return b"".join(parts)


def _send_answer(compile_guide: Compile, connection: socket.socket, message: bytes) -> None:
    """Compile the guide of a message, and send its text or why there is none."""
    params = msgspec.msgpack.decode(message, type=GuidedDecodingParams)
    try:
        answer = COMPILED + compile_guide(params).encode()
    except ValueError as error:
        answer = REFUSED + str(error).encode("utf-8", "backslashreplace")

    if len(answer) <= MAX_TEXT_BYTES:
        connection.sendall(answer)


def _serve(compile_guide: Compile, connection: socket.socket, start: Start) -> None:
    """Compile the guide of a connection within the limits, on a thread, and end this process."""
    _limit(start)
    message = read_all(connection)
    if message == PROBE:
        connection.sendall(COMPILED)
        return

    def answer() -> None:
        try:
            _send_answer(compile_guide, connection, message)
        finally:
            os._exit(0)

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=answer).start()

    # This waits until the other side is closed.
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll()


def _limit(start: Start) -> None:
    """Set the limits of this process, which the kernel enforces."""
    # The limits end this process by these signals, which the engine ignores.
    for signum in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(signum, signal.SIG_DFL)

    signal.setitimer(signal.ITIMER_REAL, start.max_compile_s)
    os.nice(NICENESS)

    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[0])

    max_bytes = num_pages * PAGE_BYTES + STACK_BYTES + start.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (start.max_cpu_s, start.max_cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    # llguidance, in Rust, would write about clients' guides to standard error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main(control: socket.socket, file: BinaryIO) -> None:
    """Fork for each guide whose connection comes over `control`. `file` has the Start."""
    linux.set_title("lmi-guides")
    linux.set_oom_score(1000)
    # A terminal sends SIGINT to its whole group, but only the engine may end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # So forks leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with file:
        start = msgspec.msgpack.decode(file.read(), type=Start)

    compile_guide: Compile = import_module(start.compiler).new_compile(start)
    pid = os.getpid()
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            # The engine has closed its end.
            return

        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                try:
                    linux.die_with_parent(pid, signal.SIGKILL)
                    _serve(compile_guide, connection, start)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), open(int(sys.argv[2]), "rb"))
    # End at once: the forks, which may still compile, end with this process.
    os._exit(0)
