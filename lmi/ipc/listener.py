"""Unix sockets that only processes of the same user can connect to."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable

from lmi.ipc.connection import Connection

log = logging.getLogger(__name__)


class Accepted(Connection):
    """The accepting end of a connection. It closes at once unless the other process belongs to this user or root."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if _peer_uid(transport.get_extra_info("socket")) not in (os.geteuid(), 0):
            log.error("refused a connection of another user")
            self.close()


async def listen(accept: Callable[[], Accepted], path: str) -> asyncio.Server:
    """Accept connections at `path`. `accept` makes the protocol of each."""
    return await asyncio.get_running_loop().create_unix_server(accept, sock=bind(path))


def bind(path: str) -> socket.socket:
    """Return a socket bound to `path` that only this user can open. It replaces a dead process's socket there."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    return listener


def _peer_uid(peer: socket.socket) -> int:
    """Return the user id of the other end. Source of the layout (pid, uid, gid): unix(7), SO_PEERCRED."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
