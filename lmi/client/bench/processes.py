"""The CPU time of a server on this machine, by process."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from lmi.shared import linux

LISTENING = "0A"  # a state of /proc/net/tcp


def cpu_of(url: str) -> dict[str, float]:
    """Return the CPU seconds so far of the processes that listen at `url` and of their descendants, by name and pid.

    Nothing if the host is not this machine, or if the processes are another user's.
    """
    parts = urlsplit(url)
    if not _is_local(parts.hostname or ""):
        return {}
    listeners = _listeners(parts.port or (443 if parts.scheme == "https" else 80))
    found = {}
    for pid in {one for listener in listeners for one in [listener, *linux.descendants(listener)]}:
        with suppress(OSError):  # it has ended, or is another user's
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found[f"{name} ({pid})"] = _cpu_s(pid)
    return found


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in ("localhost", socket.gethostname())


def _listeners(port: int) -> list[int]:
    """Return the pids of the processes that hold a listening socket of this port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and int(row[1].split(":")[1], 16) == port}
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if sockets & _open_files(pid)]


def _open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(path))
    return found


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, from user and system time of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
