"""The CPU time of a server on this machine, by process."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from lmi.http.listener import owners
from lmi.shared import linux


def cpu_of(url: str) -> dict[str, float]:
    """Return the CPU seconds so far of the processes that listen at `url` and of their descendants, by name and pid.

    Nothing if the host is not this machine, or if the processes are another user's.
    """
    parts = urlsplit(url)
    if not _is_local(parts.hostname or ""):
        return {}
    found = {}
    listeners = owners(parts.port or (443 if parts.scheme == "https" else 80))
    for pid in {one for listener in listeners for one in [listener, *linux.descendants(listener)]}:
        with suppress(OSError):  # it has ended, or is another user's
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found[f"{name} ({pid})"] = _cpu_s(pid)
    return found


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in ("localhost", socket.gethostname())


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, from user and system time of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
