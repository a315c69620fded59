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
    """The end that another process connected to. It closes at once where that is a process of another user."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if _peer_uid(transport.get_extra_info("socket")) not in (os.geteuid(), 0):
            log.error("refused a connection of another user")
            self.close()


async def listen(accept: Callable[[], Accepted], path: str) -> asyncio.Server:
    """Accept connections at `path`, each with what `accept` makes for it."""
    return await asyncio.get_running_loop().create_unix_server(accept, sock=bind(path))


def bind(path: str) -> socket.socket:
    """A socket at `path` that only this user can open. It replaces the one that a dead process left there."""
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
    """Source of the layout (pid, uid, gid): unix(7), SO_PEERCRED."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
