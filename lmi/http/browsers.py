"""What a browser may send for a page that is not this server's own: nothing, unless an option lets
it.

Any page may send a POST of plain text to any address without asking first, and reads answers if its
own name turns into this server's address (DNS rebinding). Programs that are no browsers send no
Origin. A proxy may change Host, so the browser's word that the page is of the same origin counts
too: no script can write it (Fetch Metadata, RFC 6454, 6761).
"""

import ipaddress
import re
from collections.abc import Container
from urllib.parse import unquote

from lmi.errors import ForeignPage, shorten
from lmi.http.exchange import Exchange

ANY = "*"
# With `none` the user, not a page, has asked.
OWN_PAGE = ("same-origin", "none")
USUAL_PORTS = {"http": "80", "https": "443"}


def check_page(exchange: Exchange, origins: Container[str], hosts: Container[str]) -> None:
    """Raise ForeignPage for a request of a page that is neither this server's own nor of `origins`;
    * means all.

    The same for one that names this server by none of `hosts`, if the public DNS may have that
    name.
    """
    host = exchange.headers.get("host", "")
    name = unquote(re.sub(r":\d*$", "", host)).strip("[]").rstrip(".").lower()
    is_public = "." in name and not name.endswith(".localhost") and not _is_address(name)
    if is_public and ANY not in hosts and name not in hosts:
        rule = "Host must be an address, a name without a dot, or one of lmi serve's allowed_hosts"
        raise ForeignPage(f"{rule}, given {shorten(host)}")

    origins_of_page = exchange.headers.getlist("origin")
    if not origins_of_page or ANY in origins:
        return

    rule = "Origin must be that of this server or one of lmi serve's cors_allowed_origins"
    if len(origins_of_page) > 1:
        raise ForeignPage(f"{rule}, given {len(origins_of_page)} of them")

    origin = origins_of_page[0]
    if origin in origins:
        return

    is_own = _parts_of(origin) == _parts_of(f"{exchange.scope['scheme']}://{host}")
    if not is_own and exchange.headers.get("sec-fetch-site") not in OWN_PAGE:
        raise ForeignPage(f"{rule}, given {shorten(origin)}")


def _parts_of(origin: str) -> tuple[str, str, str]:
    """Return the scheme, host and port of an origin, which may leave out the scheme's usual port.
    Source: RFC 6454.
    """
    scheme, _, place = origin.lower().partition("://")
    port = re.search(r":(\d+)$", place)
    if port is None:
        return scheme, place.removesuffix(":"), USUAL_PORTS.get(scheme, "")

    return scheme, place[: port.start()], port[1]


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
