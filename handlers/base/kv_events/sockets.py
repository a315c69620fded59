"""Sockets of ZeroMQ, whose library only this option needs."""

from types import ModuleType
from typing import Any

from handlers.base.kv_events.endpoints import KEY
from lmi.errors import BadConfiguration

INSTALL = "scripts/install kv-events, pip install pyzmq"


def zmq_library() -> ModuleType:
    """Raises BadConfiguration if it is not installed."""
    try:
        import zmq
    except ImportError:
        raise BadConfiguration(f"{KEY} needs pyzmq, which is not installed: {INSTALL}") from None

    return zmq


def open_socket(socket: Any, endpoint: str, *, is_listening: bool) -> None:
    """Bind or connect a socket. Raises BadConfiguration, and closes it, if it cannot be had."""
    connect = socket.bind if is_listening else socket.connect
    try:
        connect(endpoint)
    except zmq_library().ZMQError as error:
        socket.close(linger=0)
        verb = "bound" if is_listening else "connected to"
        raise BadConfiguration(f"{KEY}: {endpoint} cannot be {verb}: {error.strerror}") from error
