"""Who may ask for what: which port has which route, who has a key, and whose request it is."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from lmi.errors import Unauthorized
from lmi.http.browsers import ANY, check_page, is_loopback
from lmi.http.exchange import Exchange
from lmi.http.refusals import REFUSAL
from lmi.runtime import ServerRuntime
from lmi.settings.annexes import digest
from lmi.supervisor.credentials import Credentials, SharedCredentials

# Pages need no key themselves: they ask for the one that their requests need.
PAGES = ("/", "/playground", "/docs")
# These paths need no key.
PROBES = (
    "/ping",
    "/health",
    "/healthz",
    "/livez",
    "/readyz",
    "/v2/health/live",
    "/v2/health/ready",
)
KEY_FIELDS = (b"x-api-key", b"api-key")
FAIRNESS_ID = "x-llm-d-inference-fairness-id"
MAX_CLIENT_CHARS = 128
# Pages of other origins may read these headers, beside those that every page may read.
READABLE = (
    "Retry-After",
    REFUSAL,
    "X-Request-Id",
    "WWW-Authenticate",
)
# The requests of the management port, and those of both: /docs and the playground both read the
# description.
MANAGEMENT = re.compile(
    r"/metrics|/docs|/load|/server_info|/v1/(un)?load_lora_adapter|(/models/[^/]+)?/adapters(/.*)?"
)
CHANGES_MODELS = re.compile(r"POST /models|DELETE /models/[^/]+")
ANYWHERE = re.compile("|".join(map(re.escape, PROBES)) + r"|/version|/pages/.*|/openapi\.json")

log = logging.getLogger(__name__)


class Access:
    """What one front end lets in.

    Keys are known by their digests, which are looked up in a set: so the time that a comparison
    takes tells nothing of a key.
    """

    def __init__(
        self, runtime: ServerRuntime, credentials: SharedCredentials | None = None
    ) -> None:
        config = runtime.config
        self._runtime = runtime
        self._config = config
        self._is_open = not config.api_keys and config.api_key_file is None
        self._keys = keys_of(runtime)
        self._credentials = None if config.api_key_file is None else credentials
        # The credentials whose keys are among those above.
        self._current: Credentials | None = None
        hosts_of_address = () if is_loopback(config.host) else (ANY,)
        self._hosts = config.allowed_hosts or hosts_of_address
        self._has_told_of_key = False

    def check(self, exchange: Exchange) -> None:
        """Note whose request it is, for the engine's queue. Raises HTTPException, Unauthorized or
        ForeignPage.
        """
        self._check_port(exchange)
        key = self._key_of(exchange)
        if not key:
            # A page with a key has got it from the key's owner, so only the others are checked.
            check_page(exchange, self._config.cors_allowed_origins, self._hosts)

        fairness_id = None
        if self._config.trust_fairness_id:
            fairness_id = exchange.headers.get(FAIRNESS_ID)

        if fairness_id:
            exchange.client = f"id {fairness_id[:MAX_CLIENT_CHARS]}"
        elif key:
            exchange.client = f"key {key[:16]}"

    def _check_port(self, exchange: Exchange) -> None:
        """Raise HTTPException for a request that came to the wrong port. Both ports tell whether
        the server serves.
        """
        port = self._config.management_port
        path = exchange.path
        if port is None or ANYWHERE.fullmatch(path):
            return

        method_and_path = f"{exchange.method} {path}"
        is_management = bool(
            MANAGEMENT.fullmatch(path) or CHANGES_MODELS.fullmatch(method_and_path)
        )
        came_to_management_port = exchange.scope["server"][1] == port
        if is_management != came_to_management_port:
            raise HTTPException(404)

    def _key_of(self, exchange: Exchange) -> str:
        """Return the digest of the request's key, "" where it needs none. Raises Unauthorized."""
        keys = keys_of_client(exchange)
        if self._is_open:
            if keys and not self._has_told_of_key:
                # The owner of the key may believe that the server checks it.
                self._has_told_of_key = True
                log.warning(
                    "a client sent an API key, but this server has no keys and checks nothing: "
                    "it serves everyone"
                )

            return ""

        is_page = exchange.path in PAGES or exchange.path.startswith("/pages/")
        if exchange.path in PROBES or (is_page and exchange.method in ("GET", "HEAD")):
            return ""

        self._follow_file()
        for key_digest in map(digest, keys):
            if key_digest in self._keys:
                return key_digest

        why = "the request has no key"
        if keys:
            why = "this server does not know the key of the request"

        raise Unauthorized(f"{why}: send one as Authorization: Bearer KEY or x-api-key")

    def _follow_file(self) -> None:
        """Take the keys of the file as the supervisor has read it last. It may have none, and then
        nobody is served.
        """
        if self._credentials is None:
            return

        current = self._credentials.current()
        if current is not self._current:
            self._current = current
            self._keys = keys_of(self._runtime, current.keys)


def keys_of_client(exchange: Exchange) -> list[str]:
    """Return the API keys that a client sends. Signatures and passwords do not count, because
    proxies read them.
    """
    headers = exchange.headers.raw
    keys = [value for name, value in headers if name in KEY_FIELDS]
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:])

    return [key.strip().decode("latin-1") for key in keys]


def keys_of(runtime: ServerRuntime, keys_of_file: Iterable[str] = ()) -> set[str]:
    """Return the digests of a server's keys, with its own gateway's if there are any.

    `keys_of_file` are the digests of a file of keys.
    """
    keys = {*runtime.config.api_keys, *keys_of_file}
    if keys:
        with suppress(FileNotFoundError):
            keys.add(runtime.gateway_key().read_text())

    return keys


class CrossOrigin(CORSMiddleware):
    """The outermost application where `cors_allowed_origins` is given. A browser asks first, which
    needs no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        origins: Sequence[str],
        leave: Callable[[], None],
        end_requests: Callable[[], None],
    ) -> None:
        super().__init__(
            app, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=READABLE
        )
        self.leave = leave
        self.end_requests = end_requests
