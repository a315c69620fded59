"""The listening socket. A server binds it once, before any costly step, and passes it to every
front end.

If the port is taken, the error names the process that holds it, if /proc shows it. Source: proc(5),
/proc/net/tcp.
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
LISTENING = "0A"

Address = tuple[str, int]  # a number, not a name, and a port


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
        by = ""
        if (pid := next(owners(port), None)) is not None:
            by = f", it belongs to process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"

        raise PortUnavailable(
            f"cannot listen on {host} port {port}: {error.strerror or error}{by}"
        ) from error

    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
    )  # connections inherit it
    return listener


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def owners(port: int) -> Iterator[int]:
    """Yield the pids of the processes that listen on a local port, as far as this user can see
    them.
    """
    sockets = set[str]()  # as /proc names an open one
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening = [
                row
                for row in rows
                if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port
            ]
            sockets |= {f"socket:[{row[9]}]" for row in listening}

    for file in glob.iglob("/proc/[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(file) in sockets:
                yield int(file.split("/")[2])
