"""Nodes of a Ray cluster on this machine, each at a loopback address of its own and with one device
for one rank.

Ray calls the device a GPU, the only name for which it counts devices that are not there. vLLM gives
its CPU platform no name. The package in `ray_platform` adds it, so that vLLM places its CPU ranks
on these devices.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.system.container import ENVIRON, ROOT, wait_until

RAY = Path(sys.executable).with_name("ray")
PLATFORM = Path(__file__).parent / "ray_platform"
PATHS = f"{PLATFORM}:{ROOT}"
DEVICES = ("--num-gpus=1", "--num-cpus=1", "--object-store-memory=80000000")
# A node that does not answer the head three times is lost. By Ray's defaults that takes a minute.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
SILENT_S = 20.0
START_TIMEOUT_S = 90.0
STARTED = b"Ray runtime started"
# A node gives up when its raylet takes half a minute.
SLOW_START = b"timed out during startup"
# The kernel keeps 15 characters of a name
RANK = "ray::RayWorkerP"
# Source: linux/sched.h
CLONE_NEWNET = 0x40000000


@contextmanager
def own_network() -> Iterator[None]:
    """Let this thread, and all that it starts, have a network with the loopback device alone.

    Ray listens on every address of the machine, wherever its nodes are. Skips the tests where a
    network of one's own is not to be had.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as outside:
        if shutil.which("ip") is None or libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip("a network of one's own needs privileges that this machine does not give")

        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            if libc.setns(outside.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


@dataclass
class Node:
    """One `ray start`. The head is the node whose own address is `head`."""

    # an IP address of the loopback network; Ray would replace 127.0.0.1 by that of a network card
    address: str
    head: str  # address and port
    folder: Path = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> Node:
        # A short path, since Ray keeps sockets in it
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        address, port = self.head.split(":")
        is_head = self.address == address
        role = (
            ["--head", f"--port={port}", "--include-dashboard=false"]
            if is_head
            else [f"--address={self.head}"]
        )
        places = [f"--node-ip-address={self.address}", f"--temp-dir={self.folder}"]
        command = [RAY, "start", "--block", *role, *places, *DEVICES]
        environ = {**ENVIRON, **ENVIRONMENT, "PYTHONPATH": PATHS}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )

        return self

    def wait_ready(self) -> None:
        """Wait until it has started. On a busy machine that may take a second start."""
        if not self._has_started() and SLOW_START in self.log.read_bytes():
            self.kill()
            self.start()
            self._has_started()

        assert self.process.poll() is None, self.log.read_text()

    def _has_started(self) -> bool:
        """Wait until it has started or given up."""
        wait_until(
            lambda: STARTED in self.log.read_bytes() or self.process.poll() is not None,
            "the node started",
            START_TIMEOUT_S,
        )
        return self.process.poll() is None

    def pids(self, name: str = "") -> list[int]:
        """The live processes of this node whose name begins with `name`."""
        descriptors = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.process.pid:
                    title, _, status = (
                        (entry / "stat").read_text().partition("(")[2].rpartition(")")
                    )
                    if title.startswith(name) and status.split()[0] != "Z":
                        descriptors.append(int(entry.name))

        return descriptors

    def kill(self) -> None:
        """End it as a machine ends that loses power: no process says goodbye."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

            self.process.poll()

        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
