"""The head of a request: the rules that httptools does not check, and how a head is written.

Sources: RFC 9112, RFC 9110 and RFC 3986. What breaks a rule raises Refusal.
"""

import re
from collections.abc import Iterable

from httptools.parser.url_parser import URL
from starlette.datastructures import Headers

from lmi.errors import shorten
from lmi.http.refusals import Refusal

MAX_HEAD_BYTES = 64 << 10
# In a request line the parser takes two spaces for one.
TWO_SPACES = re.compile(rb"[\r\n]*[^\s]+ (?: |[^\s]+  )")
# Source: RFC 3986, 3.2.2 and 3.2.3.
HOST = re.compile(r"(\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?", re.ASCII)


def large_head() -> Refusal:
    return Refusal(431, f"a request head has at most {MAX_HEAD_BYTES} bytes")


def other_version() -> Refusal:
    return Refusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")


def check_line(line: bytes) -> None:
    """Refuse two spaces in a request line, of which the end may not have come yet."""
    if TWO_SPACES.match(line):
        raise Refusal(400, "the words of a request line have one space between them")


def check_target(method: str, url: URL) -> None:
    """Refuse what is neither a path nor a URL of HTTP. Source: RFC 9112, 3.2."""
    if url.path == b"*":
        status = 405 if method == "OPTIONS" else 400
        raise Refusal(status, f"the request target must be a path, given * with {method}")

    if url.schema is not None and url.schema.lower() not in (b"http", b"https"):
        raise Refusal(400, "the request target must be a path, or a URL of http or https")

    if url.fragment is not None or url.userinfo is not None:
        raise Refusal(400, "the request target must have no fragment and no user")


def check_fields(version: str, fields: Headers) -> None:
    """Refuse the fields of a head from which nobody knows who is asked, or where the body ends."""
    hosts = fields.getlist("host")
    if version not in ("1.0", "1.1"):
        raise other_version()

    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise Refusal(400, f"a request has exactly one Host field, this one {len(hosts)}")

    if hosts and HOST.fullmatch(hosts[0]) is None:
        raise Refusal(400, f"Host must be a name or an address, given {shorten(hosts[0])}")

    codings = ", ".join(fields.getlist("transfer-encoding")).lower()
    if version == "1.0" and codings:
        raise Refusal(400, "HTTP/1.0 has no Transfer-Encoding")

    # The end of the body can be found only if chunked is the last coding.
    if codings not in ("", "chunked"):
        status = 501 if codings.endswith("chunked") else 400
        raise Refusal(status, f"Transfer-Encoding must be chunked, given {shorten(codings)}")

    if any(value.lower() != "100-continue" for value in fields.getlist("expect")):
        raise Refusal(417, "the only expectation that can be met is 100-continue")


def head_bytes(method: bytes, target: bytes, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a head."""
    parts = [method, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in fields:
        parts += [name, b": ", value, b"\r\n"]

    return b"".join([*parts, b"\r\n"])
