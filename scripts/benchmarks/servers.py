"""A running server, for the benchmarks: start it, find its processes, count their CPU time.

Of lmi it uses only the Linux calls, which need no other package. All traffic stays on loopback.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from lmi.shared import processes


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    port: int
    process: subprocess.Popen[bytes]
    # From its start to its first 200.
    start_s: float = 0.0

    def pid(self, role: str) -> int:
        """The descendant whose title starts with `role` (lmi-front-0, lmi-engine-0 ...)."""
        for pid in processes.descendants(self.process.pid):
            if has_title(pid, role):
                return pid

        raise LookupError(f"no process {role} below {self.process.pid}")


def has_title(pid: int, start: str) -> bool:
    """Whether the command line or the name of a process starts so. The kernel keeps 15 characters
    of the name.
    """
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    if command.startswith(start):
        return True

    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return name.startswith(start[:15])


def family(pid: int) -> list[int]:
    """A process, those that it has started, and that those have started."""
    return [pid, *processes.descendants(pid)]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its threads so far."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "schedstat").read_text().split()
        nanoseconds += int(fields[0])

    return nanoseconds / 1e9


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024

    return 0.0


@contextmanager
def process(
    command: list[str],
    port: int,
    environ: Mapping[str, str | None] | None = None,
    health: str = "/ping",
    ready_s: float = 120.0,
) -> Iterator[Server]:
    """Run a server until the block ends; it is ready when `health` is 200. A variable that is None
    is removed.
    """
    # It is empty, so that the name of a model names no folder in it.
    folder = tempfile.TemporaryDirectory()
    # It is read after a failure.
    output = tempfile.TemporaryFile()
    all_variables = {**os.environ, **(environ or {})}
    variables = {name: value for name, value in all_variables.items() if value is not None}
    began_s = time.monotonic()
    child = subprocess.Popen(
        command,
        env=variables,
        stdout=output,
        stderr=output,
        cwd=folder.name,
    )
    try:
        wait_ready(port, child, health, ready_s)
        yield Server(port, child, time.monotonic() - began_s)
    except BaseException:
        output.seek(0)
        sys.stderr.write(output.read().decode(errors="replace")[-4000:])
        raise
    finally:
        stop(child)
        output.close()
        folder.cleanup()


def stop(child: subprocess.Popen[bytes], timeout_s: float = 40.0) -> None:
    """Send SIGTERM to the server, then kill the processes that it leaves behind."""
    pidfds = []
    # A process may have ended.
    with suppress(OSError):
        pidfds = [os.pidfd_open(pid) for pid in family(child.pid)]

    child.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout_s)

    for pidfd in pidfds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

        os.close(pidfd)

    child.wait()


def wait_ready(
    port: int, child: subprocess.Popen[bytes], health: str = "/ping", timeout_s: float = 120.0
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with {child.returncode} before it was ready")

        try:
            with urlopen(f"http://127.0.0.1:{port}{health}", timeout=2) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.01)

    raise TimeoutError("the server did not become ready")


@contextmanager
def lmi(
    properties: Mapping[str, object],
    model: str | None = None,
    environ: Mapping[str, str | None] | None = None,
) -> Iterator[Server]:
    """Run `lmi serve` with these settings, on a free port of loopback."""
    port = free_port()
    command = [sys.executable, "-m", "lmi", "serve", "--host", "127.0.0.1", "--port", str(port)]
    for name, value in {"log_level": "WARNING", **properties}.items():
        command += ["--set", f"{name}={value}"]

    if model:
        command.append(model)

    with process(command, port, environ) as server:
        yield server
