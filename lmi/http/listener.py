"""The listening socket. A server binds it once, before any costly step, and passes it to every
front end.

If the port is taken, the error names the process that holds it, where /proc shows it. Source:
proc(5), /proc/net/tcp.
"""

import glob
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lmi.errors import PortUnavailable

BACKLOG = 2048
SEND_BUFFER_BYTES = 128 << 10
"""The bytes that the kernel keeps for a client that does not read. The default is megabytes, which
are minutes of tokens, and only after them the server would notice that the client has stopped.
"""
# The state of a listening socket in /proc/net/tcp.
LISTENING = "0A"

# An address as a number, not a name, and a port.
Address = tuple[str, int]


def address_of(host: str, port: int) -> Address:
    """Return the address that a host name means. Raises PortUnavailable."""
    try:
        return _resolved(host, port)[1]
    except OSError as error:
        raise PortUnavailable(
            f"cannot listen on {host} port {port}: {error.strerror or error}"
        ) from error


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket. Raises PortUnavailable, which names the port and its owner."""
    try:
        family, address = _resolved(host, port)
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        reason = f"{error.strerror or error}{_owner_of(port)}"
        raise PortUnavailable(f"cannot listen on {host} port {port}: {reason}") from error

    # Connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def _owner_of(port: int) -> str:
    """Return the process that has a port, as the end of a sentence, or "" if it is not known."""
    pid = next(owners(port), None)
    if pid is None:
        return ""

    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return f", it belongs to process {pid} ({name})"


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Address]:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = addresses[0]
    return family, (str(address[0]), int(address[1]))


def owners(port: int) -> Iterator[int]:
    """Yield the pids of the processes that listen on a local port, as far as this user can see
    them.
    """
    sockets = _listening_sockets(port)
    if not sockets:
        return

    for file in glob.iglob("/proc/[0-9]*/fd/*"):
        # It may have been closed meanwhile.
        with suppress(OSError):
            if os.readlink(file) in sockets:
                yield int(file.split("/")[2])


def _listening_sockets(port: int) -> set[str]:
    """Return the sockets that listen on a port, by the names that /proc has for open files."""
    sockets = set[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        # IPv6 may be switched off.
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                local_port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == LISTENING and local_port == port:
                    sockets.add(f"socket:[{fields[9]}]")

    return sockets
