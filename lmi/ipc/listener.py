"""Unix sockets that only processes of the same user, or of one other user, can connect to."""

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
    """The accepting end of a connection. It closes at once if the other process belongs to anybody else."""

    client_uid: int | None = None  # of another user who may connect, beside this one and root

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if _peer_uid(transport.get_extra_info("socket")) not in (os.geteuid(), 0, self.client_uid):
            log.error("refused a connection of another user")
            self.close()


async def listen(accept: Callable[[], Accepted], path: str, uid: int | None = None) -> asyncio.Server:
    """Accept connections at `path`, also of processes of user `uid`. `accept` makes the protocol of each."""

    def accepted() -> Accepted:
        connection = accept()
        connection.client_uid = uid
        return connection

    return await asyncio.get_running_loop().create_unix_server(accepted, sock=bind(path, uid))


def bind(path: str, uid: int | None = None) -> socket.socket:
    """Return a socket bound to `path` that only one user can open. It replaces a dead process's socket there."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    if uid is not None:
        os.chown(path, uid, -1, follow_symlinks=False)
    return listener


def _peer_uid(peer: socket.socket) -> int:
    """Return the user id of the other end. Source of the layout (pid, uid, gid): unix(7), SO_PEERCRED."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
