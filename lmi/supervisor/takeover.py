"""A new server takes the ports of one that runs on this machine, without a moment in which nobody
listens.

1. Each server listens at an abstract unix socket that is named for its address: the end of its
   `Handover`. A server that starts with `takeover` connects to it, and from then on knows the old
   server as its `Predecessor`.
2. The new server gets the listening sockets at once, so they stay open whatever happens to the old
   one. It loads its model while the old one serves on.
3. Its front ends accept on the same sockets as those of the old one, so no connection that waits in
   them is lost. Then it says READY.
4. The old server accepts no more connections, and drains.

If either closes the conversation before READY, because it failed or was told to stop, the other
serves alone.

Sources: unix(7) for abstract sockets, which the kernel removes with their owner, SO_PEERCRED and
SCM_RIGHTS.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import msgspec

from lmi.errors import PortUnavailable
from lmi.http.listener import Address, address_of, bind

BACKLOG = 4
# The time in which the old server has to answer, also where its supervisor is busy.
ANSWER_S = 10.0
MAX_MESSAGE_BYTES = 4096
MAX_FDS = 8
READY = b"ready"
# The least time for which a server whose ports were taken over serves its connections. Each ends
# with its next answer. So those of busy clients end by themselves in that time, and no client sends
# a request on a connection that is just being closed.
LEAST_LEAVING_S = 3.0
# The pid, uid and gid of the other end.
CREDENTIALS = struct.Struct("3i")

log = logging.getLogger(__name__)


class Offer(msgspec.Struct, frozen=True):
    """What a running server answers one that asks for its ports. The sockets come with it, unless
    it refuses.
    """

    pid: int
    refusal: str = ""


class Owner(NamedTuple):
    """The process at the other end of a socket, and its user."""

    pid: int
    uid: int


class Handover:
    """The end of a running server, at which another one asks for its ports. Nothing here waits."""

    def __init__(
        self, listeners: Sequence[socket.socket], end: socket.socket | None = None
    ) -> None:
        """Open the end, unless it is `end`, which the server before has opened. Where it cannot be
        opened, nobody can take the ports over.
        """
        self._listeners = listeners
        self._end = end or _open_end(listeners[0].getsockname()[:2])
        # The conversation with the server that loads.
        self._heir: socket.socket | None = None
        self._heir_pid = 0

    def look(self) -> int | None:
        """Answer a server that asks for the ports. Returns the pid of the one that serves in this
        one's place, once there is one.
        """
        if self._end is None:
            return None

        with suppress(BlockingIOError, ConnectionError):
            asker, _ = self._end.accept()
            with asker:
                self._answer(asker)

        return self._ready_heir()

    def close(self) -> None:
        """Answer nobody any more. A server that loads sees it, and knows that this one is gone."""
        for end in (self._heir, self._end):
            if end is not None:
                end.close()

        self._heir = None
        self._end = None

    def _answer(self, asker: socket.socket) -> None:
        assert self._end is not None
        owner = _owner_of(asker)
        refusal = self._refusal(owner)
        sockets = [] if refusal else [*self._listeners, self._end]
        offer = msgspec.json.encode(Offer(os.getpid(), refusal))
        asker.setblocking(False)
        socket.send_fds(asker, [offer], [end.fileno() for end in sockets])

        if refusal:
            log.warning("process %d asked for the port of this server: %s", owner.pid, refusal)
            return

        log.info(
            "process %d loads beside this server, and takes its port over when it is ready",
            owner.pid,
        )
        self._heir = asker.dup()
        self._heir_pid = owner.pid

    def _refusal(self, owner: Owner) -> str:
        """Return why a process does not get the ports, or "" if it gets them. The kernel shows a
        process of another container with the pid 0.
        """
        if owner.uid != os.geteuid():
            return f"it belongs to another user ({os.geteuid()})"

        if self._heir is not None:
            return f"process {self._heir_pid} takes it over already"

        if os.getpid() == 1 and owner.pid != 0:
            return "it is the first process of a container, which would end with it"

        return ""

    def _ready_heir(self) -> int | None:
        """Return the pid of the server that loaded beside this one, if it has said that it is
        ready. Forget it if it has given up.
        """
        if self._heir is None:
            return None

        try:
            message = self._heir.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionError:
            message = b""

        if message == READY:
            return self._heir_pid

        log.warning(
            "process %d has given up taking the port over; this server serves on", self._heir_pid
        )
        self._heir.close()
        self._heir = None
        return None


class Predecessor:
    """The old server, as it is known in the new one. `talk` is their conversation, `sockets` are
    those that the old server has sent.
    """

    def __init__(self, pid: int, talk: socket.socket, sockets: Iterable[socket.socket]) -> None:
        self.pid = pid
        self._talk = talk
        self._listeners: dict[Address, socket.socket] = {}
        # The end of its Handover.
        self.end: socket.socket | None = None
        # Whether the old server is there and serves.
        self.is_there = True

        for received in sockets:
            # `recv_fds` leaves it open whether children inherit them.
            received.set_inheritable(False)
            if received.family == socket.AF_UNIX:
                received.setblocking(False)
                self.end = received
            else:
                self._listeners[received.getsockname()[:2]] = received

    def listener(self, host: str, port: int) -> socket.socket:
        """Return the socket that listens at an address: the old server's, or a new one. Raises
        PortUnavailable.
        """
        listener = self._listeners.pop(address_of(host, port), None)
        return bind(host, port) if listener is None else listener

    def close_others(self) -> None:
        """Close the sockets at addresses that the new server does not have."""
        for listener in self._listeners.values():
            listener.close()

        self._listeners.clear()

    def give_up(self) -> None:
        """Leave the ports to the old server. The end of this process does the same."""
        self.close_others()
        self._leave()
        if self.end is not None:
            self.end.close()

    def look(self) -> None:
        """Notice that the old server has ended. Then its clients wait in the sockets, and nobody
        answers them, so this server has to.
        """
        if not self.is_there:
            return

        try:
            is_gone = not self._talk.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            is_gone = True

        if is_gone:
            log.warning(
                "process %d, which had the port, has ended; this server listens in its place now",
                self.pid,
            )
            self._leave()

    def say_ready(self) -> None:
        """Let the old server drain, because this one serves."""
        if not self.is_there:
            return

        with suppress(ConnectionError, BlockingIOError):
            self._talk.send(READY)

        log.info(
            "took the port over from process %d, which ends when its open requests have", self.pid
        )
        self._leave()

    def _leave(self) -> None:
        self.is_there = False
        self._talk.close()


def find(host: str, port: int) -> Predecessor | None:
    """Return the server of this user that listens at an address, or None if there is none. Raises
    PortUnavailable if it refuses, or does not answer.
    """
    with ExitStack() as on_failure:
        talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_failure.callback(talk.close)
        talk.settimeout(ANSWER_S)
        try:
            talk.connect(_name(address_of(host, port)))
            uid = _owner_of(talk).uid
            if uid != os.geteuid():
                raise PortUnavailable(
                    f"{host} port {port} cannot be taken over: its server belongs to user {uid}"
                )

            message, fds, _, _ = socket.recv_fds(talk, MAX_MESSAGE_BYTES, MAX_FDS)
        except TimeoutError:
            raise PortUnavailable(
                f"{host} port {port} cannot be taken over: its server does not answer"
            ) from None
        except OSError:
            # Nobody is there.
            return None

        sockets = [socket.socket(fileno=fd) for fd in fds]
        if not message:
            return None

        offer = msgspec.json.decode(message, type=Offer)
        if offer.refusal:
            raise PortUnavailable(
                f"{host} port {port} cannot be taken over from process {offer.pid}: {offer.refusal}"
            )

        # The conversation goes on.
        on_failure.pop_all()

    talk.setblocking(False)
    log.info("process %d has the port and serves on until this server is ready", offer.pid)
    return Predecessor(offer.pid, talk, sockets)


def _open_end(address: Address) -> socket.socket | None:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        end.bind(_name(address))
        end.listen(BACKLOG)
    except OSError as error:
        log.debug("no other server can take the port over: %s", error)
        end.close()
        return None

    return end


def _name(address: Address) -> bytes:
    """Return the name of the abstract socket of the server at an address. The number in it is the
    version of the conversation.
    """
    host, port = address
    return f"\0lmi-takeover-1/{host}/{port}".encode()


def _owner_of(end: socket.socket) -> Owner:
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(credentials)
    return Owner(pid, uid)
