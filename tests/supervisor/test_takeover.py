"""A server hands its listening sockets over, as its two ends see it. tests/system has whole
servers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from lmi.errors import PortUnavailable
from lmi.http.listener import bind
from lmi.supervisor.takeover import Handover, Predecessor, find
from tests.machine import wait_until

HOST = "127.0.0.1"
NOBODY = 65534


class Old:
    """A server that has a port, and whose supervisor looks at its end while another asks."""

    def __init__(self) -> None:
        self.listeners = [bind(HOST, 0), bind(HOST, 0)]
        self.port, self.management_port = (listener.getsockname()[1] for listener in self.listeners)
        self.handover = Handover(self.listeners)
        self.gave: list[Predecessor] = []

    def gives(self) -> Predecessor:
        """What a server gets that asks."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(find, HOST, self.port)
            wait_until(
                lambda: self.handover.look() or future.done(), "the one who asks has an answer"
            )
            predecessor = future.result()

        assert predecessor is not None
        self.gave.append(predecessor)
        return predecessor

    def close(self) -> None:
        self.handover.close()
        for listener in self.listeners:
            listener.close()

    def close_all(self) -> None:
        self.close()
        for predecessor in self.gave:
            predecessor.give_up()


@pytest.fixture
def old() -> Iterator[Old]:
    with ExitStack() as stack:
        old = Old()
        stack.callback(old.close_all)
        yield old


def test_where_nobody_has_the_port_nobody_is_found() -> None:
    with bind(HOST, 0) as listener:
        assert find(HOST, listener.getsockname()[1]) is None, "a port of no server"


def test_the_new_server_gets_the_sockets_and_connections_that_wait_in_them(old: Old) -> None:
    new = old.gives()
    listener = new.listener(HOST, old.port)
    management = new.listener(HOST, old.management_port)
    new.close_others()
    old.close()
    for port, inherited in ((old.port, listener), (old.management_port, management)):
        with socket.create_connection((HOST, port)) as client, inherited:
            with inherited.accept()[0] as accepted:
                assert accepted.getpeername() == client.getsockname()

            assert not inherited.get_inheritable()


def test_an_address_that_the_old_server_does_not_have_is_bound(old: Old) -> None:
    new = old.gives()
    with new.listener(HOST, old.port), bind(HOST, 0) as foreign_listener:
        with pytest.raises(PortUnavailable, match="it belongs to process"):
            new.listener(HOST, foreign_listener.getsockname()[1])

    new.close_others()


def test_the_old_server_learns_who_serves_in_its_place_and_then_the_new_one_is_asked(
    old: Old,
) -> None:
    new = old.gives()
    assert old.handover.look() is None, "it still loads"
    new.say_ready()
    assert old.handover.look() == os.getpid()
    old.handover.close()
    old.handover = Handover(old.listeners, new.end)
    assert old.gives().pid == os.getpid()


def test_a_new_server_that_fails_leaves_the_port_to_the_old_one_and_to_the_next_that_asks(
    old: Old,
) -> None:
    new = old.gives()
    with pytest.raises(
        PortUnavailable,
        match=f"from process {os.getpid()}: process {os.getpid()} takes it over alread",
    ):
        old.gives()

    new.give_up()
    assert old.handover.look() is None

    old.gives().say_ready()
    assert old.handover.look() == os.getpid()


def test_a_new_server_learns_that_the_old_one_has_ended(old: Old) -> None:
    new = old.gives()
    new.look()
    assert new.is_there
    old.close()
    new.look()
    assert not new.is_there
    new.say_ready()


def test_an_old_server_that_ends_while_it_is_asked_is_not_found(old: Old) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(find, HOST, old.port)
        old.close()
        assert future.result() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_gets_nothing(old: Old) -> None:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(NOBODY)
        try:
            find(HOST, old.port)
        except PortUnavailable as error:
            os.write(writer, str(error).encode())

        os._exit(0)

    os.close(writer)
    os.waitpid(pid, 0)
    message = os.read(reader, 1000).decode()
    os.close(reader)
    assert message.endswith("cannot be taken over: its server belongs to user 0")

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_heard_by, NOBODY, old.port)
        wait_until(lambda: old.handover.look() or future.done(), "it has an answer")
        assert "belongs to another user (0)" in future.result()


def _heard_by(uid: int, port: int) -> str:
    """What a process of another user hears that does not look whose server it asks."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(uid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as talk:
            talk.connect(f"\0lmi-takeover-1/{HOST}/{port}".encode())
            message, fds, _, _ = socket.recv_fds(talk, 1000, 8)
            os.write(writer, message if not fds else b"it got sockets")

        os._exit(0)

    os.close(writer)
    os.waitpid(pid, 0)
    message = os.read(reader, 1000).decode()
    os.close(reader)
    return message
