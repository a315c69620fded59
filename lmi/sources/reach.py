"""Where a hub may send a fetch: to what the operator named, or over https to an address of the
public internet.

A hub answers many requests with a redirect, and its real files lie on other hosts. A hostile one
could let this process ask what only this machine reaches: another port, a service of metadata, the
network behind a firewall. Sources: RFC 6890 (special addresses), RFC 6052 (addresses of IPv4 in
IPv6).
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, Self

import httpx2

PORTS = {"http": 80, "https": 443}
# A host with or without a port.
HOST = re.compile(r"(?:\[([^]]+)]|([^][:]+))(?::([0-9]+))?")
LOCAL_NAMES = ("localhost", ".localhost")
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# 6to4, whose packets go to the address of IPv4 in it.
RELAYED = ipaddress.IPv6Network("2002::/16")
# The last 32 bits of these are an address of IPv4.
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class OpenedHost(NamedTuple):
    """A host that the operator opens with `download_hosts`."""

    # A name or an address. `*` opens every host, and `*.example` those whose names end so.
    name: str
    # None means every port.
    port: int | None

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the host that a text names. Raises ValueError if it names none."""
        parts = HOST.fullmatch(text)
        if parts is None:
            raise ValueError(text)

        address, name, port = parts.groups()
        return cls((address or name).lower(), int(port) if port else None)

    def has(self, host: str, port: int) -> bool:
        if self.port not in (None, port):
            return False

        is_below = self.name.startswith("*.") and host.endswith(self.name[1:])
        return self.name in ("*", host) or is_below


class Reach:
    """Which URLs may be asked, where a server chooses them. `endpoint` is the URL that the operator
    has named, by `named_by`.
    """

    def __init__(
        self, endpoint: str, opened: Iterable[str] = (), named_by: str = "HF_ENDPOINT"
    ) -> None:
        self._endpoint = httpx2.URL(endpoint)
        self._named_by = named_by
        self._opened = [OpenedHost.of(text) for text in opened]

    @property
    def is_url(self) -> bool:
        """Whether the endpoint is a URL that can be asked."""
        return self._endpoint.scheme in PORTS and bool(self._endpoint.host)

    def is_named(self, url: httpx2.URL) -> bool:
        """Return whether the operator named the place of a URL, and so trusts whatever address it
        has.
        """
        if url.scheme not in PORTS:
            return False

        host = _host(url)
        port = _port(url)
        if any(opened.has(host, port) for opened in self._opened):
            return True

        is_host = host == _host(self._endpoint)
        is_port = port == _port(self._endpoint) or (url.scheme, port) == ("https", PORTS["https"])
        is_less_safe = url.scheme == "http" and self._endpoint.scheme == "https"
        return is_host and is_port and not is_less_safe

    def fault(self, url: httpx2.URL) -> str | None:
        """Return why a URL must not be asked, as far as its text says it, or None."""
        if self.is_named(url):
            return None

        if url.scheme != "https":
            place = f"the host and port that {self._named_by} names"
            return f"{origin(url)} is neither https nor {place}"

        host = _host(url)
        if host == LOCAL_NAMES[0] or host.endswith(LOCAL_NAMES[1]):
            return f"{origin(url)} is this machine"

        # What is no address is a name.
        with suppress(ValueError):
            return self.fault_of_address(url, str(_literal(host)))

        return None

    def fault_of_address(self, url: httpx2.URL, address: str) -> str | None:
        """Return why the address that the host of a URL has must not be asked, or None."""
        if self.is_named(url) or is_public(address):
            return None

        return f"{origin(url)} has the address {address}, which is not one of the public internet"


def is_public(text: str) -> bool:
    """Return whether an address is one that the public internet reaches, also one of IPv4 within
    one of IPv6.
    """
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address in TRANSLATED:
            address = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        elif address not in GLOBAL_UNICAST or address in RELAYED:
            return False

    return address.is_global and not address.is_multicast


def origin(url: httpx2.URL) -> str:
    """Return scheme, host and port of a URL, without the secrets that its other parts may have."""
    return f"{url.scheme}://{opening(url)}"


def opening(url: httpx2.URL) -> str:
    """Return host and port of a URL, as `download_hosts` opens them."""
    host = f"[{_host(url)}]" if ":" in url.host else _host(url)
    return host if url.port is None else f"{host}:{url.port}"


def _host(url: httpx2.URL) -> str:
    return url.host.lower().rstrip(".")


def _port(url: httpx2.URL) -> int:
    return url.port or PORTS.get(url.scheme, 0)


def _literal(host: str) -> Address:
    """Return the address that a host is, also in the short forms that the system's resolver takes
    (127.1, 0x7f000001).

    Raises ValueError if it is a name.
    """
    with suppress(OSError):
        return ipaddress.IPv4Address(socket.inet_aton(host))

    return ipaddress.ip_address(host)
