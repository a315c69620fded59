"""Runs a launcher, such as mpirun, and stands in for the engine process that the launcher starts.

    agent                     the supervisor's child, in place of the engine
    └ the launcher            leads a session
      ├ far_end
      │ └ the engine process
      └ what else it starts   further ranks

A launcher need not pass signals on, nor end when the engine does, nor with its exit code. So the agent hands its
signals to the engine through `far_end`, and ends as the engine ends, or with code 1 if the launcher ends first. None of
its descendants outlives it.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import lmi.shared.log
from lmi.errors import StartError
from lmi.runtime import Runtime
from lmi.settings.handler import announced
from lmi.shared import linux
from lmi.shared.sink import STDOUT, guard_streams
from lmi.shared.state import EngineRecord, Phase

PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)  # an end with a drain, and the stacks of a process that hangs
BEFORE_LOADING = ("launch", "", "import")  # the stages of an engine until its library is imported
WAIT_S = 1.0  # a signal, a death and the socket each end the wait
END_S = 2.0  # in which a launcher ends what it has started, on other machines too

log = logging.getLogger("lmi.engine.agent")  # this module is __main__ where it runs


class Turn:
    """The launches of one model's engines begin one after another: a launcher may choose a port long before it uses it.

    A turn ends when the engine has imported its library, or with this process.
    """

    def __init__(self, path: Path, record: EngineRecord) -> None:
        """Wait for the turn of the engine with this record."""
        self._record = record
        self._file = path.open("wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def look(self) -> None:
        """End the turn if its time has come."""
        if self._record.phase == Phase.READY or self._record.stage not in BEFORE_LOADING:
            self._file.close()


class Launch:
    """A launcher and the engine process that it starts."""

    def __init__(self, command: Sequence[str], listener: socket.socket, turn: Turn) -> None:
        """Run `command`. Its `far_end` connects to `listener`."""
        self._turn = turn
        self._name = Path(command[0]).name
        self._listener = listener
        self._link: socket.socket | None = None  # to the far end, once it runs
        self._signals = linux.Signals()
        linux.adopt_orphans()
        self._pid = linux.spawn(command, os.environ, death_signal=signal.SIGKILL, has_session=True)
        self._code: int | None = None  # of the launcher, once it has ended
        self._is_lost = False  # whether the far end was killed

    def wait(self) -> int | None:
        """Return how the engine ended: its code, the negative number of a signal, or None if the launcher ended it."""
        while True:
            self._turn.look()
            source = self._listener if self._link is None else self._link
            for signum in self._signals.wait(WAIT_S, [source.fileno()]):
                self._pass_on(signum)
            if self._link is None:
                self._accept()
            elif (code := self._engine_code()) is not None or self._is_lost:
                return code
            if self._has_ended():
                return None if self._link is None else self._engine_code()

    def end(self) -> None:
        """End the launcher and everything that it has started."""
        if self._code is None and not self._is_lost:  # Open MPI 4 may crash at a signal while it ends its ranks
            linux.send(self._pid, signal.SIGTERM)
        deadline_s = time.monotonic() + END_S
        while not self._has_ended() and time.monotonic() < deadline_s:
            self._signals.wait(0.05)
        while pids := linux.children():  # their own children come here too
            for pid in pids:
                linux.send(pid, signal.SIGKILL)
            self._signals.wait(0.02)
            linux.reap()

    def describe(self) -> str:
        """Return how the launcher ended the engine, for people."""
        if self._code is None:
            return f"what {self._name} ran was killed"
        return f"{self._name} {linux.describe_exit(self._code)} while the engine ran"

    def _pass_on(self, signum: signal.Signals) -> None:
        if signum not in PASSED_ON:
            return
        if self._link is not None:
            with suppress(OSError):  # it has ended, which is noticed next
                self._link.send(bytes([signum]))
        elif signum == signal.SIGTERM:  # there is no engine yet that could end by itself
            self.end()
            end_as(-signum)

    def _accept(self) -> None:
        """Take the far end's connection, if it is there, and give it the log and the output of this process."""
        try:
            self._link, _ = self._listener.accept()
        except BlockingIOError:
            return
        self._link.setblocking(False)
        with suppress(OSError):
            socket.send_fds(self._link, [b"f"], [lmi.shared.log.fd(), STDOUT])

    def _engine_code(self) -> int | None:
        """Return how the engine ended, or None if it runs or if the far end, with which it dies, was killed."""
        assert self._link is not None
        message = received(self._link)
        self._is_lost = message == b""
        return int(message) if message else None

    def _has_ended(self) -> bool:
        for pid, code in linux.reap():
            if pid == self._pid:
                self._code = code
        return self._code is not None


def received(link: socket.socket) -> bytes | None:
    """Return the next message of the far end, b"" if it has closed the link, or None if nothing came.

    After a signal that the far end did not read any more, the kernel reports an error first, and then its last message.
    """
    try:
        return link.recv(16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return received(link)


def run(slot: int, own: Sequence[str]) -> int:
    """Let the handler's launcher run the engine's own command. Returns its exit code, or a signal's negative number."""
    runtime = Runtime.from_environ()
    record = _claimed(runtime, slot)
    folder = runtime.path / f"launch-{slot}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{os.getpid()}.sock"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.setblocking(False)
            turn = Turn(runtime.path / "turn", record)
            record.stage = "launch"
            return _run(Launch(_command(runtime, own, path, record), listener, turn), record)
    except StartError as error:
        record.reason = str(error)
        return error.exit_code
    finally:
        path.unlink(missing_ok=True)


def _claimed(runtime: Runtime, slot: int) -> EngineRecord:
    """Take the record of the engine, under whose name this process logs."""
    record = runtime.attach().engines[slot]
    record.claim()
    record.phase, record.stage = Phase.LOADING, "turn"
    linux.set_title(f"lmi-agent-{slot}")
    server = runtime.config.server
    lmi.shared.log.setup(f"engine {slot}", server.log_level, server.log_format, linux.log_fd())
    return record


def _command(runtime: Runtime, own: Sequence[str], path: Path, record: EngineRecord) -> Sequence[str]:
    def beat() -> None:
        record.beat_s = time.monotonic()

    config = runtime.config.engine
    launcher = announced()[config.handler].launcher(config)
    assert launcher is not None, "else the supervisor starts the engine"
    return launcher([sys.executable, "-P", "-m", "lmi.engine.far_end", str(path), *own], path.parent, beat)


def _run(launch: Launch, record: EngineRecord) -> int:
    try:
        code = launch.wait()
    finally:
        record.phase = Phase.LOST  # at once: to end the rest takes a moment
        launch.end()
    if code is None:
        record.reason = launch.describe()
        log.error("%s", record.reason)
    return 1 if code is None else code


def end_as(code: int) -> NoReturn:
    """End this process as another one ended."""
    sys.stdout.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lmi.engine.agent", description=__doc__)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("command", nargs="+", help="that starts the engine process")
    arguments = parser.parse_args()
    guard_streams()
    end_as(run(arguments.slot, arguments.command))


if __name__ == "__main__":
    main()
