"""The CPU time of a server on this machine."""

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from lmi.http.listener import owners
from lmi.shared import processes

# The places of the ticks in user and in system mode, behind the name of a process. Source: proc(5).
USER_TICKS = 11
SYSTEM_TICKS = 12


def cpu_of(url: str) -> dict[str, float]:
    """Return the CPU seconds so far of the processes that listen at `url` and of their descendants,
    by name and pid.

    Nothing if the host is not this machine, or if the processes are another user's.
    """
    parts = urlsplit(url)
    is_local = parts.hostname in ("localhost", socket.gethostname())
    with suppress(ValueError):
        is_local |= ipaddress.ip_address(parts.hostname or "").is_loopback

    if not is_local:
        return {}

    default_port = 443 if parts.scheme == "https" else 80
    pids = set[int]()
    for listener in owners(parts.port or default_port):
        pids.add(listener)
        pids.update(processes.descendants(listener))

    cpu_s: dict[str, float] = {}
    for pid in pids:
        # It may have ended, or be another user's.
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            cpu_s[f"{processes.title(pid)} ({pid})"] = ticks / os.sysconf("SC_CLK_TCK")

    return cpu_s
