"""The process that compiles guides before the engine does: a compilation cannot be stopped
otherwise.

It has read the vocabulary once and forks for each guide, which comes over a connection of its own.
The kernel ends a fork that reaches a limit, and no answer means that. The engine imports this
module too, without llguidance.
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

MAX_COMPILATIONS = 4  # at a time
MAX_COMPILE_S = 2  # of processor time
MAX_COMPILE_WAIT_S = 15.0  # by the clock, on a machine that gives the process little time
MAX_MEMORY_BYTES = 1 << 30  # of all compilations together, and at most an eighth of the container's
MAX_TEXT_BYTES = 16 << 20  # of the answer
COMPILED = b"+"
REFUSED = b"-"
PROBE = b""  # asks for nothing; its answer is COMPILED
STACK_BYTES = 64 << 20  # less than in the engine, so that what ends with an overflow ends here
NICENESS = 5  # the engine's step goes first
PAGE_BYTES = resource.getpagesize()

Compile = Callable[[GuidedDecodingParams], str]  # raises ValueError


def max_compile_bytes() -> int:
    """The memory that one compilation may take."""
    return min(MAX_MEMORY_BYTES, machine.memory_bytes() // 8) // MAX_COMPILATIONS


class Start(msgspec.Struct):
    """What the process reads first.

    `vocab_size` is the width of the logits, `max_compile_s` the time of a guide by the clock. JSON
    that `is_compact` has no spaces between its values. `compiler` is a module whose `new_compile`
    makes of this a function from a guide to its text for the engine; `backends` is for it alone.
    """

    vocab_size: int
    max_compile_s: float = MAX_COMPILE_WAIT_S
    is_compact: bool = True
    compiler: str = "handlers.guides.text"
    backends: tuple[str, ...] = ()
    max_cpu_s: int = MAX_COMPILE_S
    max_bytes: int = msgspec.field(default_factory=max_compile_bytes)
    config: GuidedDecodingConfig = GuidedDecodingConfig(
        []
    )  # the vocabulary, which is read with the first guide


def read_all(connection: socket.socket) -> bytes:
    """Read up to the end of the stream."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)

    return b"".join(parts)


def _answer(compile: Compile, connection: socket.socket, message: bytes) -> None:
    params = msgspec.msgpack.decode(message, type=GuidedDecodingParams)
    try:
        answer = COMPILED + compile(params).encode()
    except ValueError as error:
        answer = REFUSED + str(error).encode("utf-8", "backslashreplace")

    if len(answer) <= MAX_TEXT_BYTES:
        connection.sendall(answer)


def _compile(compile: Compile, connection: socket.socket, start: Start) -> None:
    """Compile the guide of a connection within the limits, on a thread, and end this process."""
    _limit(start)
    if (message := read_all(connection)) == PROBE:
        connection.sendall(COMPILED)
        return

    def answer() -> None:
        try:
            _answer(compile, connection, message)
        finally:
            os._exit(0)

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=answer).start()
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll()  # until the other side is closed


def _limit(start: Start) -> None:
    for signum in (
        signal.SIGALRM,
        signal.SIGXCPU,
    ):  # by which the limits end this process; the engine ignores them
        signal.signal(signum, signal.SIG_DFL)

    signal.setitimer(signal.ITIMER_REAL, start.max_compile_s)
    os.nice(NICENESS)
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * PAGE_BYTES

    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + STACK_BYTES + start.max_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (start.max_cpu_s,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Rust says of each client's guide


def main(control: socket.socket, file: BinaryIO) -> None:
    linux.set_title("lmi-guides")
    linux.set_oom_score(1000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the engine ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    with file:
        start = msgspec.msgpack.decode(file.read(), type=Start)

    compile: Compile = import_module(start.compiler).new_compile(start)
    pid = os.getpid()
    while fds := socket.recv_fds(control, 1, 1)[1]:  # none when the engine has closed its end
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                try:
                    linux.die_with_parent(pid, signal.SIGKILL)
                    _compile(compile, connection, start)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), open(int(sys.argv[2]), "rb"))
    os._exit(0)  # at once, with what it compiles
