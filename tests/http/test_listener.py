"""The listening socket, and the owner of a taken port."""

from __future__ import annotations

import os
import socket

import pytest

from lmi.errors import PortUnavailable
from lmi.http.listener import SEND_BUFFER_BYTES, bind, owners


def test_a_bound_port_takes_connections() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5.0).close()
        assert list(owners(port)) == [os.getpid()]


def test_ipv6_is_listened_on_too() -> None:
    with bind("::1", 0) as listener:
        socket.create_connection(("::1", listener.getsockname()[1]), 5.0).close()


def test_a_port_without_a_listener_has_no_owner() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert list(owners(bound.getsockname()[1])) == []


def test_a_taken_port_is_refused_with_its_owner() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            PortUnavailable, match=rf"127.0.0.1 port {port}: .* process {os.getpid()} \("
        ):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(PortUnavailable, match="no.such.host.invalid port 80"):
        bind("no.such.host.invalid", 80)


def test_the_kernel_keeps_little_for_a_client_that_does_not_read() -> None:
    with bind("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            # The kernel doubles the size
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
