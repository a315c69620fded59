"""A new server takes the ports of one that runs on this machine, without a moment in which nobody
listens.

Each server keeps an end open at an abstract socket that is named for its address (`Handover`). A
server that starts with `takeover` asks there (`Predecessor`), and gets the listening sockets at
once: they stay open whatever happens to the old server. It loads its model while the old one serves
on. Its front ends then accept beside those of the old one, on the same sockets, so no connection
that waits in them is lost, and it says READY. The old one accepts no more, and drains. If either
closes the conversation before that, because it failed or was told to stop, the other serves alone.

Sources: unix(7) for abstract sockets, which the kernel removes with their owner, SO_PEERCRED and
SCM_RIGHTS.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from lmi.errors import PortUnavailable
from lmi.http.listener import Address, address_of, bind

BACKLOG = 4
# A server whose supervisor is busy has so long to answer.
ANSWER_S = 10.0
MAX_MESSAGE_BYTES = 4096
MAX_FDS = 8
READY = b"ready"
# How long a server whose ports were taken over serves the connections that it has. Each ends with
# its next answer, so those whose clients are busy are closed by then, and no client sends a request
# to one that is being closed.
LEAST_LEAVING_S = 3.0
# The pid, uid and gid of the other end.
CREDENTIALS = struct.Struct("3i")

log = logging.getLogger(__name__)


class Offer(msgspec.Struct, frozen=True):
    """What a running server says to one that asks for its ports. Its sockets come with it, unless
    it refuses.
    """

    pid: int
    refusal: str = ""


class Owner(NamedTuple):
    """Whose the other end of a socket is."""

    pid: int
    uid: int


class Handover:
    """The end of a running server, at which another one asks for its ports. Nothing here waits."""

    def __init__(
        self, listeners: Sequence[socket.socket], end: socket.socket | None = None
    ) -> None:
        """Open the end, unless it comes from the server before. Without one, nobody takes the ports
        over.
        """
        self._listeners = listeners
        self._end = end or _open_end(listeners[0].getsockname()[:2])
        # The conversation with the server that loads.
        self._heir: socket.socket | None = None
        self._heir_pid = 0

    def look(self) -> int | None:
        """Answer one who asks. Returns the pid of the server that serves in this one's place, once
        there is one.
        """
        if self._end is None:
            return None

        with suppress(BlockingIOError, ConnectionError):
            asker, _ = self._end.accept()
            with asker:
                self._answer(asker)

        return self._heard()

    def close(self) -> None:
        """Answer nobody any more. A server that loads then knows that this one is gone."""
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
        """Return why a process does not get the ports, or "". A pid of 0 is one of another
        container.
        """
        if owner.uid != os.geteuid():
            return f"it belongs to another user ({os.geteuid()})"

        if self._heir is not None:
            return f"process {self._heir_pid} takes it over already"

        if os.getpid() == 1 and owner.pid != 0:
            return "it is the first process of a container, which would end with it"

        return ""

    def _heard(self) -> int | None:
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
    """The server that has the ports, as the one sees it that takes them over."""

    def __init__(self, pid: int, talk: socket.socket, sockets: Iterable[socket.socket]) -> None:
        self.pid = pid
        self._talk = talk
        self._listeners: dict[Address, socket.socket] = {}
        # That of its Handover.
        self.end: socket.socket | None = None
        # Whether it is there and serves.
        self.is_there = True

        for end in sockets:
            # `recv_fds` leaves that open.
            end.set_inheritable(False)
            if end.family == socket.AF_UNIX:
                end.setblocking(False)
                self.end = end
            else:
                self._listeners[end.getsockname()[:2]] = end

    def listener(self, host: str, port: int) -> socket.socket:
        """Return the socket that listens at an address: its own, or a new one. Raises
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
        """Notice that it has ended, so that its clients wait in the sockets and nobody answers
        them.
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
        """Let it drain, because this server serves."""
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
    """Return the server of this user that listens at an address, or None. Raises PortUnavailable if
    it refuses.
    """
    talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    talk.settimeout(ANSWER_S)
    try:
        talk.connect(_name(address_of(host, port)))
        owner = _owner_of(talk).uid
        if owner != os.geteuid():
            raise PortUnavailable(
                f"{host} port {port} cannot be taken over: its server belongs to user {owner}"
            )

        message, fds, _, _ = socket.recv_fds(talk, MAX_MESSAGE_BYTES, MAX_FDS)
    except TimeoutError:
        talk.close()
        raise PortUnavailable(
            f"{host} port {port} cannot be taken over: its server does not answer"
        ) from None
    except OSError:
        # Nobody is there.
        talk.close()
        return None

    sockets = [socket.socket(fileno=fd) for fd in fds]
    if not message:
        talk.close()
        return None

    offer = msgspec.json.decode(message, type=Offer)
    if offer.refusal:
        talk.close()
        raise PortUnavailable(
            f"{host} port {port} cannot be taken over from process {offer.pid}: {offer.refusal}"
        )

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
    """Return the name of the abstract socket of the server at an address. Its number is that of
    this conversation.
    """
    host, port = address
    return f"\0lmi-takeover-1/{host}/{port}".encode()


def _owner_of(end: socket.socket) -> Owner:
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(credentials)
    return Owner(pid, uid)
