"""Asks a hub that nobody trusts: answers have limits of size, time and depth, and redirects lead
only where they may.

The hub's own client has none of these limits. It also reads the body of a redirect, unpacks
whatever packing an answer has, and sends the token along to the next page of a list, wherever that
is. Sources: RFC 9110, and the `trace` extension of httpx2.
"""

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import httpx2
import msgspec
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from lmi.errors import SecurityRefused, cause_line, one_line
from lmi.sources.job import NO_BYTE_S, MayPass
from lmi.sources.reach import Reach, opening

# The bytes of one answer of the API, unpacked. A page of 1,000 files has 0.3 MB.
MAX_ANSWER_BYTES = 32 << 20
MAX_ANSWER_S = 300.0
MAX_REDIRECTS = 10
# The bytes of a redirect's body, which is read so that its connection can be used again.
MAX_IGNORED_BYTES = 64 << 10
MAX_ERROR_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
PLAIN_ENCODINGS = ("", "identity")
GZIP_ENCODINGS = ("gzip", "x-gzip")
GZIP_ONLY = 16 + zlib.MAX_WBITS

log = logging.getLogger(__name__)

T = TypeVar("T")


class NoHub(ValueError):
    """An answer is not one of a hub: too large, too deep, of a wrong type, or packed as nobody
    asked for.
    """


class HubRefusal(Exception):
    """The hub answers with a status that says no. The text is its reason."""

    def __init__(self, status: int, code: str, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.status = status
        # One of the hub's own words, as GatedRepo, or "".
        self.code = code
        # How long the hub asks to be left alone.
        self.wait_s = wait_s


class _ErrorBody(msgspec.Struct):
    error: str


@dataclass(frozen=True, slots=True)
class ApiAnswer(Generic[T]):
    """An answer of the hub's API as a value, the response it came with, and its bytes."""

    value: T
    response: httpx2.Response
    num_bytes: int


class HubClient:
    """Asks one hub. `subject` begins the message about a place where it must not send us."""

    def __init__(self, subject: object, reach: Reach) -> None:
        self._subject = subject
        self._reach = reach

    def close(self) -> None:
        """Close the connections that are kept."""
        self._client.close()

    @cached_property
    def _client(self) -> httpx2.Client:
        """A client with the proxies and certificates that the environment names, which take a
        moment to read.
        """
        return httpx2.Client()

    @contextmanager
    def get(
        self, url: str, headers: Mapping[str, str], *, silence_s: float = NO_BYTE_S
    ) -> Iterator[httpx2.Response]:
        """Ask, and follow redirects. Yields the last answer, whatever its status, with its body
        still to be read.

        Without a byte for `silence_s` the client raises an error. Raises SecurityRefused for a
        redirect to a place that the operator did not name and that is not public, and NoHub for too
        many of them.
        """
        request: httpx2.Request | None = self._client.build_request(
            "GET", url, headers=dict(headers)
        )
        for _ in range(MAX_REDIRECTS + 1):
            if request is None:
                raise NoHub("it redirects to a text that is no URL")

            self._prepare(request, silence_s)
            response = self._client.send(request, stream=True, follow_redirects=False)
            try:
                if not response.has_redirect_location:
                    yield response
                    return

                _ignore_body(response)
                request = response.next_request
            finally:
                response.close()

        raise NoHub(f"it redirects more than {MAX_REDIRECTS} times")

    def answer(
        self,
        url: str,
        headers: Mapping[str, str],
        kind: type[T],
        *,
        left_bytes: int | None = None,
        count: Callable[[int], None] = lambda num_bytes: None,
    ) -> ApiAnswer[T]:
        """Return an answer of the hub's API as a value of this kind.

        `count` gets the bytes as they come, and `left_bytes` is how many may come, if fewer than
        usual. Raises HubRefusal for a status that says no, and NoHub for an answer that is not of
        this kind, or larger.
        """
        max_bytes = MAX_ANSWER_BYTES if left_bytes is None else min(MAX_ANSWER_BYTES, left_bytes)
        body = bytearray()
        with self.get(url, {**headers, "Accept-Encoding": "gzip"}) as response:
            raise_for_status(response)
            deadline_s = time.monotonic() + MAX_ANSWER_S
            for data in pieces(response):
                count(len(data))
                body += data
                if len(body) > max_bytes:
                    raise NoHub(f"an answer to {response.url.path} has more than {max_bytes} bytes")

                if time.monotonic() > deadline_s:
                    raise MayPass(
                        f"an answer to {response.url.path} is not whole after {MAX_ANSWER_S:g} s"
                    )

        try:
            value = msgspec.json.decode(body, type=kind)
        except RecursionError as error:
            raise NoHub(f"an answer to {response.url.path} is nested too deeply") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NoHub(f"an answer to {response.url.path}: {cause_line(error)}") from error

        return ApiAnswer(value, response, len(body))

    def _prepare(self, request: httpx2.Request, silence_s: float) -> None:
        """Look where a request would go, and limit its silence. Raises SecurityRefused."""
        fault = self._reach.fault(request.url)
        if fault is not None:
            raise self._elsewhere(request.url, fault)

        phases = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = dict.fromkeys(phases, silence_s)
        request.extensions["trace"] = self._watch(request.url)

    def _watch(self, url: httpx2.URL) -> Callable[[str, Mapping[str, Any]], None]:
        """Return what looks at the address of each new connection, before a byte is sent over it.

        The name of a host may have any address, and another one at each look. The address of a
        proxy is not looked at, which the operator has named and which looks up the other names
        itself.
        """
        host = url.raw_host.decode("ascii")
        # The host of the connection that begins.
        connecting_to = ""

        def look(event: str, info: Mapping[str, Any]) -> None:
            nonlocal connecting_to
            if event == "connection.connect_tcp.started":
                connecting_to = info["host"]

            if event != "connection.connect_tcp.complete" or connecting_to != host:
                return

            stream = info["return_value"]
            try:
                address = stream.get_extra_info("server_addr")[0]
            except OSError as error:
                # The other side has closed the connection.
                raise httpx2.ConnectError(str(error)) from error

            fault = self._reach.fault_of_address(url, address)
            if fault is not None:
                stream.close()
                raise self._elsewhere(url, fault)

        return look

    def _elsewhere(self, url: httpx2.URL, fault: str) -> SecurityRefused:
        way_out = f"download_hosts={opening(url)} allows it"
        return SecurityRefused(
            f"{self._subject}: it redirects to a place that nobody named: {fault}; {way_out}"
        )


def pieces(response: httpx2.Response) -> Iterator[bytes]:
    """Yield a body in pieces of a bounded size, unpacked where gzip packed it. Raises NoHub for any
    other packing.

    What httpx2 unpacks by itself may be a thousand times as large as what came, and is in memory at
    once.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding in PLAIN_ENCODINGS:
        yield from response.iter_raw()
        return

    if encoding not in GZIP_ENCODINGS:
        raise NoHub(f"an answer to {response.url.path} is packed as {encoding!a}")

    unpacker = zlib.decompressobj(GZIP_ONLY)
    try:
        for packed in response.iter_raw():
            while packed:
                yield unpacker.decompress(packed, PIECE_BYTES)
                packed = unpacker.unconsumed_tail

        yield unpacker.flush()
    except zlib.error as error:
        raise NoHub(
            f"an answer to {response.url.path} is not the gzip that it says it is"
        ) from error


def raise_for_status(response: httpx2.Response) -> None:
    """Raise HubRefusal unless an answer says yes."""
    if response.is_success:
        return

    reason = response.headers.get("X-Error-Message")
    reason = reason or _reason_in_body(response) or response.reason_phrase or "no reason"
    code = response.headers.get("X-Error-Code", "")
    wait_s = _wait_s(response.headers)
    raise HubRefusal(response.status_code, code, one_line(reason), wait_s)


def _reason_in_body(response: httpx2.Response) -> str:
    """Return the reason that the body of an error gives, or ""."""
    body = b""
    with suppress(
        httpx2.HTTPError, NoHub, msgspec.MsgspecError, RecursionError, UnicodeDecodeError
    ):
        for data in pieces(response):
            body += data
            if len(body) > MAX_ERROR_BYTES:
                return ""

        return msgspec.json.decode(body, type=_ErrorBody).error

    return ""


def _ignore_body(response: httpx2.Response) -> None:
    num_bytes = 0
    for data in response.iter_raw():
        num_bytes += len(data)
        if num_bytes > MAX_IGNORED_BYTES:
            return


def _wait_s(headers: httpx2.Headers) -> float:
    """Return how long the hub asks to be left alone, in seconds."""
    seconds = headers.get("Retry-After", "")
    # A number may have thousands of digits.
    with suppress(ValueError, OverflowError):
        limit = parse_ratelimit_headers(headers)
        if limit is not None and limit.remaining == 0:
            return float(limit.reset_in_seconds)

        if seconds.isdecimal():
            return float(seconds)

    return 0.0
