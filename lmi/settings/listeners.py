"""The options of the listeners beside the server's own port, of TLS, and of the user that the
processes run as.
"""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from lmi.settings.kinds import ABSOLUTE_PATH, WORDS, Kind, integer, matching, word
from lmi.settings.option import Settings, option
from lmi.settings.user import User

GATEWAY_PORT = 8081


def _address(text: str) -> tuple[str, int]:
    """Return the host and the port of a URL."""
    parts = urlsplit(text)
    is_whole = parts.scheme == "http" and parts.path in ("", "/")
    if not is_whole or not parts.hostname or not parts.port:
        raise ValueError

    return parts.hostname, parts.port


def _port_range(first: str, last: str) -> tuple[int, int]:
    if not 1 <= int(first) <= int(last) <= 65535:
        raise ValueError

    return int(first), int(last)


PORT = integer(1, 65535)
ADDRESS = Kind("http://HOST:PORT", _address)
GATEWAY_WORDS = {
    text: GATEWAY_PORT if means else None for text, means in WORDS.items() if text.isalpha()
}
GATEWAY = Kind(
    f"a port 1..65535, true (port {GATEWAY_PORT}) or false",
    word(GATEWAY_WORDS, PORT.parse),
    unit="[PORT]",
)
PORT_RANGE = matching(
    "FIRST-LAST, two ports", r"([0-9]{1,5})-([0-9]{1,5})", _port_range, "FIRST-LAST"
)


class ListenersConfig(Settings):
    """Where else the server listens, by which certificate, and as whom."""

    management_port: int | None = option(None, PORT)
    """port of metrics, docs and the routes that change models and adapters; `port` answers them 404
    then
    """
    inference_address: ClassVar = option(None, ADDRESS)
    """host and port in one"""
    gateway_port: int | None = option(None, GATEWAY, key="with_gateway")
    """port on loopback for AWS's SageMaker API in front of the server; without PORT: 8081"""
    async_queue: str | None = option(None, ABSOLUTE_PATH, is_for_operator=True, is_path=True)
    """folder where the gateway of with_gateway keeps accepted asynchronous requests until each has
    its answer, so that the next server goes on with them; nothing: they end with this gateway
    """
    ssl_certfile: str | None = option(None, ABSOLUTE_PATH, is_path=True)
    """file with this server's certificate and those that signed it, in PEM; the port speaks HTTPS
    then; SIGHUP reads it again
    """
    ssl_keyfile: str | None = option(None, ABSOLUTE_PATH, is_path=True)
    """file with the certificate's key, without a password; nothing: ssl_certfile has it too"""
    user: User | None = option(
        None,
        Kind("a user that this machine knows, UID or UID:GID, and not root", User.of),
        key="option.user",
        is_for_operator=True,
    )
    """user that all processes but the supervisor and those that fetch run as where root starts the
    server; nothing: the same user
    """
    takeover: bool = option(False, is_for_operator=True)
    """take the port over from the server of lmi that has it, once this one is ready; that one
    drains then. Where no server has it, this one starts as usual
    """
    safe_port_range: tuple[int, int] | None = option(
        None, PORT_RANGE, names="SAGEMAKER_SAFE_PORT_RANGE"
    )
    """ports for every listener beside the server's own port, such as an engine's rendezvous"""

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"
