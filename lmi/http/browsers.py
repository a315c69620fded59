"""What a browser may send for a page that is not this server's own: nothing, unless an option lets
it.

Without these checks any page could send a POST of plain text to any address, and could read the
answers after its own name was made to mean this server's address (DNS rebinding). Programs that are
no browsers send no Origin. A proxy may change Host, so a page also counts as this server's own if
the browser says so in Sec-Fetch-Site, which no script can write.

Sources: RFC 6454, RFC 6761, and Fetch Metadata.
"""

import ipaddress
import re
from collections.abc import Container
from urllib.parse import unquote

from lmi.errors import ForeignPage, shorten
from lmi.http.exchange import Exchange

ANY = "*"
# The values of Sec-Fetch-Site that are allowed. With `none` the user, not a page, has asked.
OWN_PAGE = ("same-origin", "none")
USUAL_PORTS = {"http": "80", "https": "443"}


def check_page(exchange: Exchange, origins: Container[str], hosts: Container[str]) -> None:
    """Raise ForeignPage unless Host and Origin are allowed. In `hosts` and `origins` * allows all.

    Host may be a name that the public DNS cannot have, or one of `hosts`. Origin may be this
    server's own, or one of `origins`.
    """
    _check_host(exchange.headers.get("host", ""), hosts)
    _check_origin(exchange, origins)


def _check_host(host: str, hosts: Container[str]) -> None:
    name = unquote(re.sub(r":\d*$", "", host)).strip("[]").rstrip(".").lower()
    is_public = "." in name and not name.endswith(".localhost") and not _is_address(name)
    if is_public and ANY not in hosts and name not in hosts:
        rule = "Host must be an address, a name without a dot, or one of lmi serve's allowed_hosts"
        raise ForeignPage(f"{rule}, given {shorten(host)}")


def _check_origin(exchange: Exchange, origins: Container[str]) -> None:
    origins_of_page = exchange.headers.getlist("origin")
    if not origins_of_page or ANY in origins:
        return

    rule = "Origin must be that of this server or one of lmi serve's cors_allowed_origins"
    if len(origins_of_page) > 1:
        raise ForeignPage(f"{rule}, given {len(origins_of_page)} of them")

    origin = origins_of_page[0]
    if origin in origins:
        return

    address = f"{exchange.scope['scheme']}://{exchange.headers.get('host', '')}"
    is_own = _parts_of(origin) == _parts_of(address)
    if not is_own and exchange.headers.get("sec-fetch-site") not in OWN_PAGE:
        raise ForeignPage(f"{rule}, given {shorten(origin)}")


def _parts_of(origin: str) -> tuple[str, str, str]:
    """Return the scheme, host and port of an origin, also where the usual port is left out. Source:
    RFC 6454.
    """
    scheme, _, authority = origin.lower().partition("://")
    port = re.search(r":(\d+)$", authority)
    if port is None:
        return scheme, authority.removesuffix(":"), USUAL_PORTS.get(scheme, "")

    return scheme, authority[: port.start()], port[1]


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from its own machine only."""
    if host == "localhost":
        return True

    return _is_address(host) and ipaddress.ip_address(host).is_loopback
