"""Who may send requests: clients with a key of `option.api_key`, if there are any, and this server's own gateway."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lmi.errors import BadConfiguration, Unauthorized, cause_line
from lmi.http.exchange import Exchange
from lmi.runtime import ServerRuntime
from lmi.settings.kinds import KEYS, digest

PAGES = ("/", "/playground", "/docs")  # they ask for the key that their requests need
PROBES = ("/ping", "/health", "/healthz", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready")  # need no key


class Keys:
    """The digests of the keys. A digest is looked up, so the time of a comparison tells nothing of a key."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._digests = set(runtime.config.api_keys)
        if (file := runtime.config.api_key_file) is not None:
            self._digests.update(read_keys(Path(file)))
        if self._digests:
            with suppress(FileNotFoundError):
                self._digests.add(runtime.gateway_key().read_text())

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, exchange: Exchange) -> None:
        """Note whose request it is. Raises Unauthorized for one without a key."""
        is_page = exchange.path in PAGES or exchange.path.startswith("/pages/")
        if not self._digests or exchange.path in PROBES or (is_page and exchange.method in ("GET", "HEAD")):
            return
        given = list(map(digest, exchange.given_keys))
        exchange.key = next((key for key in given if key in self._digests), "")
        if not exchange.key:
            what = "this server does not know the key of the request" if given else "the request has no key"
            raise Unauthorized(f"{what}: send one as Authorization: Bearer KEY or x-api-key")


def read_keys(path: Path) -> list[str]:
    """Return the digests of the keys in a file. Raises BadConfiguration."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        found = [key for line in lines if line for key in KEYS.parse(line)]
    except (OSError, ValueError) as error:
        said = cause_line(error) if isinstance(error, OSError) else f"a line is not {KEYS.allowed}"
        raise BadConfiguration(f"option.api_key_file={path} cannot be read: {said}") from None
    if not found:
        raise BadConfiguration(f"option.api_key_file={path} has no key")
    return found
