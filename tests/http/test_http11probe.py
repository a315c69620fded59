"""The cases of Http11Probe (MDA2AV), a public suite of RFC 9110, RFC 9112 and request smuggling,
with our verdicts.

Each row is a case: its name there, what is sent, what counts as right there, and the statuses that
this server answers. The requests are written anew from the suite's descriptions, with bodies that
the route of `POST /` takes. Its cases of cookies, caches and echoed fields are left out, since no
route here has any of them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.scripted import Host, host

N = 18
BODY = b'{"inputs":"say a"}'
CHUNK = b"12\r\n" + BODY + b"\r\n"
LENGTH = f"Content-Length: {N}"
CHUNKED = "Transfer-Encoding: chunked"
# 404 shows that the connection was kept
LAST = b"GET /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SILENCE_S = 0.2
CLOSING = (400, 413, 417, 431, 501, 505)
# The request is not complete, so there is no answer
WAIT: tuple[int, ...] = ()

# What counts as right. The connection may be closed instead of 400; what is asked for once is
# answered once.
REJECT = "400"
CODING = "400 501"
VERSION = "400 505"
SERVE = "2xx"
EITHER = "400 2xx"
INCOMPLETE = "400 wait"
NO_SWITCH = "400 2xx 426"


class Row(NamedTuple):
    case: str
    data: bytes
    right: str
    ours: tuple[int, ...]


def get(*fields: str, line: str = "GET / HTTP/1.1", body: bytes = b"") -> bytes:
    return "\r\n".join([line, "Host: localhost", *fields, "", ""]).encode("latin-1") + body


def post(*fields: str, body: bytes = BODY, line: str = "POST / HTTP/1.1") -> bytes:
    return get(*fields, line=line, body=body)


def chunks(body: bytes = CHUNK + b"0\r\n\r\n") -> bytes:
    return post(CHUNKED, body=body)


def line(text: str) -> bytes:
    return get(line=text)


def both(*fields: str, inner: bytes = get()) -> bytes:
    """A body that ends before an inner request for one reader, and after it for another."""
    body = b"0\r\n\r\n" + inner
    return post(*(field.format(len(body)) for field in fields), body=body)


SOCKET = (
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
UPGRADE = ("Connection: Upgrade", *SOCKET)
FOLDED = "Transfer-Encoding:\r\n chunked"
COMPLIANCE = [
    Row("BASELINE", get(), SERVE, (200,)),
    Row("BARE-LF-REQUEST-LINE", b"GET / HTTP/1.1\nHost: localhost\r\n\r\n", EITHER, (400,)),
    Row("BARE-LF-HEADER", b"GET / HTTP/1.1\r\nHost: localhost\nX: a\r\n\r\n", EITHER, (400,)),
    Row("OBS-FOLD", get("X: a\r\n b"), REJECT, (400,)),
    Row("SP-BEFORE-COLON", get("X : a"), REJECT, (400,)),
    Row("MULTI-SP-REQUEST-LINE", line("GET  / HTTP/1.1"), EITHER, (400,)),
    Row("MISSING-HOST", b"GET / HTTP/1.1\r\n\r\n", REJECT, (400,)),
    Row("INVALID-VERSION", line("GET / HTTP/9.9"), VERSION, (505,)),
    Row("EMPTY-HEADER-NAME", get(": a"), REJECT, (400,)),
    Row("CR-ONLY-LINE-ENDING", b"GET / HTTP/1.1\rHost: localhost\r\n\r\n", REJECT, (400,)),
    Row("MISSING-TARGET", line("GET HTTP/1.1"), REJECT, (400,)),
    Row("FRAGMENT-IN-TARGET", line("GET /a#b HTTP/1.1"), EITHER, (400,)),
    Row("HTTP09-REQUEST", b"GET /\r\n", INCOMPLETE, WAIT),
    Row("INVALID-HEADER-NAME", get("X[Y: a"), REJECT, (400,)),
    Row("HEADER-NO-COLON", get("Nothing"), REJECT, (400,)),
    Row("DUPLICATE-HOST", get("Host: other.example"), REJECT, (400,)),
    Row("CL-NON-NUMERIC", post("Content-Length: abc", body=b""), REJECT, (400,)),
    Row("CL-PLUS-SIGN", post(f"Content-Length: +{N}"), REJECT, (400,)),
    Row(
        "WHITESPACE-BEFORE-HEADERS",
        b"GET / HTTP/1.1\r\n \r\nHost: localhost\r\n\r\n",
        REJECT,
        (400,),
    ),
    Row("DUPLICATE-HOST-SAME", get("Host: localhost"), REJECT, (400,)),
    Row("HOST-WITH-USERINFO", b"GET / HTTP/1.1\r\nHost: u@localhost\r\n\r\n", REJECT, (400,)),
    Row("HOST-WITH-PATH", b"GET / HTTP/1.1\r\nHost: localhost/a\r\n\r\n", REJECT, (400,)),
    Row("ASTERISK-WITH-GET", line("GET * HTTP/1.1"), REJECT, (400,)),
    Row("OPTIONS-STAR", line("OPTIONS * HTTP/1.1"), SERVE, (405,)),
    Row("UNKNOWN-TE-501", post("Transfer-Encoding: gzip", body=b""), CODING, (400,)),
    Row("LEADING-CRLF", b"\r\n\r\n" + get(), EITHER, (200,)),
    Row("ABSOLUTE-FORM", line("GET http://localhost/ HTTP/1.1"), EITHER, (200,)),
    Row("METHOD-CASE", line("get / HTTP/1.1"), "400 405 501 2xx", (400,)),
    Row("POST-CL-BODY", post(LENGTH), SERVE, (200,)),
    Row("POST-CL-ZERO", post("Content-Length: 0", body=b""), SERVE, (422,)),
    Row("POST-NO-CL-NO-TE", post(body=b""), SERVE, (422,)),
    Row("POST-CL-UNDERSEND", post(f"Content-Length: {N + 5}"), INCOMPLETE, WAIT),
    Row("CHUNKED-BODY", chunks(), SERVE, (200,)),
    Row("CHUNKED-MULTI", chunks(b'b\r\n{"inputs":"\r\n7\r\nsay a"}\r\n0\r\n\r\n'), SERVE, (200,)),
    Row("CHUNKED-EMPTY", chunks(b"0\r\n\r\n"), SERVE, (422,)),
    Row("CHUNKED-NO-FINAL", chunks(CHUNK), INCOMPLETE, WAIT),
    Row("UPGRADE-POST", post(*UPGRADE, LENGTH), NO_SWITCH, (200,)),
    Row("UPGRADE-MISSING-CONN", get(*SOCKET), NO_SWITCH, (200,)),
    Row("UPGRADE-UNKNOWN", get("Connection: Upgrade", "Upgrade: made-up/1.0"), NO_SWITCH, (200,)),
    Row(
        "METHOD-CONNECT",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n",
        "400 405 501",
        (405,),
    ),
    Row("EXPECT-UNKNOWN", get("Expect: 200-ok"), "417 2xx", (417,)),
    Row("GET-WITH-CL-BODY", get("Content-Length: 5", body=b"hello"), EITHER, (200,)),
    Row("CHUNKED-EXTENSION", chunks(b"12;a=b\r\n" + BODY + b"\r\n0\r\n\r\n"), EITHER, (200,)),
    Row("UPGRADE-INVALID-VER", get(*UPGRADE[:-1], "Sec-WebSocket-Version: 99"), NO_SWITCH, (200,)),
    Row("METHOD-TRACE", line("TRACE / HTTP/1.1"), "405 501 2xx", (405,)),
    Row("HOST-EMPTY-VALUE", b"GET / HTTP/1.1\r\nHost: \r\n\r\n", REJECT, (200,)),
    Row("REQUEST-LINE-TAB", line("GET\t/ HTTP/1.1"), EITHER, (400,)),
    Row("VERSION-MISSING-MINOR", line("GET / HTTP/1"), REJECT, (400,)),
    Row("VERSION-LEADING-ZEROS", line("GET / HTTP/01.01"), REJECT, (400,)),
    Row("VERSION-WHITESPACE", line("GET / HTTP/ 1.1"), REJECT, (400,)),
    Row("CONNECTION-CLOSE", get("Connection: close"), SERVE, (200,)),
    Row("HTTP10-DEFAULT-CLOSE", line("GET / HTTP/1.0"), SERVE, (200,)),
    Row("HTTP10-NO-HOST", b"GET / HTTP/1.0\r\n\r\n", EITHER, (200,)),
    Row("HTTP12-VERSION", line("GET / HTTP/1.2"), "2xx 505", (505,)),
    Row("TRACE-WITH-BODY", get(LENGTH, line="TRACE / HTTP/1.1", body=BODY), "400 405 2xx", (405,)),
    Row("CHUNKED-TRAILER-VALID", chunks(CHUNK + b"0\r\nX-Checksum: a\r\n\r\n"), SERVE, (200,)),
    Row(
        "CHUNKED-HEX-UPPERCASE",
        chunks(b"1A\r\n" + BODY + b" " * 8 + b"\r\n0\r\n\r\n"),
        SERVE,
        (200,),
    ),
    Row("RANGE-POST", post(LENGTH, "Range: bytes=0-10"), SERVE, (200,)),
    Row("UPGRADE-HTTP10", get(*UPGRADE, line="GET / HTTP/1.0"), NO_SWITCH, (200,)),
    Row("HEAD-NO-BODY", line("HEAD / HTTP/1.1"), SERVE, (200,)),
    Row("UNKNOWN-METHOD", line("FOOBAR / HTTP/1.1"), "400 405 501", (400,)),
    Row("405-ALLOW", line("DELETE / HTTP/1.1"), "405", (405,)),
    Row(
        "NO-1XX-HTTP10", post(LENGTH, "Expect: 100-continue", line="POST / HTTP/1.0"), SERVE, (200,)
    ),
    Row("OPTIONS-ALLOW", line("OPTIONS / HTTP/1.1"), "2xx 405", (405,)),
    Row("VERSION-CASE", line("GET / http/1.1"), REJECT, (400,)),
    Row("LONG-URL-OK", line(f"GET /?{'a' * 7900} HTTP/1.1"), SERVE, (200,)),
    Row("SPACE-IN-TARGET", line("GET /a b HTTP/1.1"), REJECT, (400,)),
    Row(
        "DUPLICATE-CT",
        post(LENGTH, "Content-Type: text/plain", "Content-Type: text/html"),
        EITHER,
        (200,),
    ),
    Row(
        "TRACE-SENSITIVE",
        get("Authorization: Bearer a", line="TRACE / HTTP/1.1"),
        "405 501",
        (405,),
    ),
    Row("RANGE-INVALID", get("Range: bytes=abc-xyz"), "2xx 416", (200,)),
    Row("ACCEPT-NONSENSE", get("Accept: application/x-nonsense"), "2xx 406", (200,)),
    Row(
        "POST-UNSUPPORTED-CT",
        post(LENGTH, "Content-Type: application/x-nonsense"),
        "2xx 415",
        (200,),
    ),
]
# Values of Content-Length that are none
LENGTHS = {
    "CL-NEGATIVE": "-1",
    "CL-OCTAL": "0o22",
    "CL-HEX-PREFIX": "0x12",
    "CL-INTERNAL-SPACE": "1 8",
    "CL-COMMA-DIFFERENT": f"{N}, 10",
    "CL-UNDERSCORE": "1_8",
    "CL-NEGATIVE-ZERO": "-0",
}
# Lines before a chunk that are none
SIZES = {
    "CHUNK-BARE-SEMICOLON": b"12;\r\n",
    "CHUNK-EXT-INVALID-TOKEN": b"12;a[=b\r\n",
    "CHUNK-UNDERSCORE": b"1_2\r\n",
    "CHUNK-HEX-PREFIX": b"0x12\r\n",
    "CHUNK-SIZE-PLUS": b"+12\r\n",
    "CHUNK-SIZE-TRAILING-OWS": b"12 \r\n",
    "CHUNK-LEADING-SP": b" 12\r\n",
    "CHUNK-EXT-CTRL": b"12;\0a\r\n",
    "CHUNK-EXT-CR": b"12;a\rb\r\n",
    "CHUNK-NEGATIVE": b"-1\r\n",
    "CHUNK-BARE-CR-TERM": b"12\r",
}
# A coding beside a length, what counts as right, and our answer
CODINGS = {
    "TE-XCHUNKED": ("Transfer-Encoding: xchunked", CODING, 400),
    "TE-TRAILING-SPACE": ("Transfer-Encoding: chunked ", "400 501 2xx", 400),
    "TE-SP-BEFORE-COLON": ("Transfer-Encoding : chunked", REJECT, 400),
    "TE-DOUBLE-CHUNKED": ("Transfer-Encoding: chunked, chunked", EITHER, 400),
    "TE-CASE-MISMATCH": ("Transfer-Encoding: Chunked", EITHER, 400),
    "TE-EMPTY-VALUE": ("Transfer-Encoding: ", REJECT, 400),
    "TE-LEADING-COMMA": ("Transfer-Encoding: , chunked", EITHER, 400),
    "TE-DUPLICATE-HEADERS": (
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        REJECT,
        400,
    ),
    "TE-VTAB": ("Transfer-Encoding: \x0bchunked", REJECT, 400),
    "TE-FORMFEED": ("Transfer-Encoding: \x0cchunked", REJECT, 400),
    "TE-NULL": ("Transfer-Encoding: chunked\0", REJECT, 400),
    "TE-IDENTITY": ("Transfer-Encoding: identity", CODING, 400),
    "CHUNKED-WITH-PARAMS": ("Transfer-Encoding: chunked;a=b", EITHER, 400),
    "TE-OBS-FOLD": (FOLDED, EITHER, 400),
    "TE-TRAILING-COMMA": ("Transfer-Encoding: chunked,", EITHER, 400),
    "TE-TAB-BEFORE-VALUE": ("Transfer-Encoding:\tchunked", EITHER, 400),
    "TRANSFER_ENCODING": ("Transfer_Encoding: chunked", EITHER, 200),
}
# Fields after a body that may have no effect there
TRAILERS = {
    "TRAILER-CL": ("Content-Length: 50", 400),
    "TRAILER-TE": (CHUNKED, 400),
    "TRAILER-HOST": ("Host: evil.example", 200),
    "TRAILER-AUTH": ("Authorization: Bearer evil", 200),
    "TRAILER-CONTENT-TYPE": ("Content-Type: text/evil", 200),
}
# An inner request, which one reading of the outer one runs
EMBEDDED = {
    "CLTE-SMUGGLED-GET": both("Content-Length: {}", CHUNKED),
    "CLTE-SMUGGLED-GET-CL-PLUS": both("Content-Length: +{}", CHUNKED),
    "CLTE-SMUGGLED-GET-CL-NON-NUMERIC": both("Content-Length: {}x", CHUNKED),
    "CLTE-SMUGGLED-GET-TE-OBS-FOLD": both(FOLDED, "Content-Length: {}"),
    "CLTE-SMUGGLED-HEAD": both("Content-Length: {}", CHUNKED, inner=line("HEAD / HTTP/1.1")),
    "CLTE-SMUGGLED-GET-TE-TRAILING-SPACE": both("Content-Length: {}", CHUNKED + " "),
    "CLTE-SMUGGLED-GET-TE-LEADING-COMMA": both(
        "Content-Length: {}", "Transfer-Encoding: , chunked"
    ),
    "CLTE-SMUGGLED-GET-TE-CASE-MISMATCH": both("Content-Length: {}", "Transfer-Encoding: Chunked"),
    "TE-DUPLICATE-HEADERS-SMUGGLED-GET": both(
        CHUNKED, "Transfer-Encoding: identity", "Content-Length: {}"
    ),
    "TECL-SMUGGLED-GET": post(
        CHUNKED, "Content-Length: 4", body=b"2b\r\n" + get("Content-Length: 7") + b"\r\n0\r\n\r\n"
    ),
    "DUPLICATE-CL-SMUGGLED-GET": post(
        "Content-Length: 4", "Content-Length: 43", body=b"PING" + get()
    ),
    "CLTE-DESYNC": post("Content-Length: 6", CHUNKED, body=b"0\r\n\r\nX") + get(),
    "TECL-DESYNC": post(CHUNKED, "Content-Length: 30", body=b"0\r\n\r\nX") + get(),
    "CLTE-CONN-CLOSE": post("Content-Length: 5", CHUNKED, body=b"0\r\n\r\n") + get(),
    "TECL-CONN-CLOSE": post(CHUNKED, "Content-Length: 5", body=b"0\r\n\r\n") + get(),
    "CHUNK-INVALID-SIZE-DESYNC": chunks(b"+0\r\n\r\nX") + get(),
    "OPTIONS-TE-OBS-FOLD": get(
        FOLDED, "Content-Length: 5", line="OPTIONS / HTTP/1.1", body=b"hello"
    )
    + get(),
}
SMUGGLING = [
    *(
        Row(case, post(f"Content-Length: {value}"), REJECT, (400,))
        for case, value in LENGTHS.items()
    ),
    *(
        Row(case, chunks(size + BODY + b"\r\n0\r\n\r\n"), REJECT, (400,))
        for case, size in SIZES.items()
    ),
    *(
        Row(case, post(field, LENGTH), right, (ours,))
        for case, (field, right, ours) in CODINGS.items()
    ),
    *(
        Row(case, chunks(CHUNK + b"0\r\n" + field.encode() + b"\r\n\r\n"), EITHER, (ours,))
        for case, (field, ours) in TRAILERS.items()
    ),
    *(Row(case, data, REJECT, (400,)) for case, data in EMBEDDED.items()),
    Row("CL-TE-BOTH", post(LENGTH, CHUNKED, body=CHUNK + b"0\r\n\r\n"), EITHER, (400,)),
    Row("DUPLICATE-CL", post(LENGTH, "Content-Length: 10"), REJECT, (400,)),
    Row("CL-LEADING-ZEROS", post(f"Content-Length: 00{N}"), EITHER, (200,)),
    Row("CLTE-PIPELINE", post("Content-Length: 4", CHUNKED, body=b"0\r\n\r\n"), EITHER, (400,)),
    Row("TECL-PIPELINE", post(CHUNKED, "Content-Length: 30", body=b"0\r\n\r\n"), EITHER, (400,)),
    Row("CL-TRAILING-SPACE", post(f"{LENGTH} "), EITHER, (200,)),
    Row("CL-EXTRA-LEADING-SP", post(f"Content-Length:  {N}"), EITHER, (200,)),
    Row(
        "TE-NOT-FINAL-CHUNKED",
        post("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"),
        REJECT,
        (400,),
    ),
    Row("TE-HTTP10", post(CHUNKED, LENGTH, line="POST / HTTP/1.0"), REJECT, (400,)),
    Row("BARE-CR-HEADER-VALUE", post(LENGTH, "X: a\rb"), REJECT, (400,)),
    Row("CHUNK-MISSING-TRAILING-CRLF", chunks(b"12\r\n" + BODY + b"0\r\n\r\n"), REJECT, (400,)),
    Row("CHUNK-EXT-LF", chunks(b"12;\n" + BODY + b"\r\n0\r\n\r\n"), EITHER, (400,)),
    Row("CHUNK-SPILL", chunks(b"10\r\n" + BODY + b"\r\n0\r\n\r\n"), REJECT, (400,)),
    Row("CHUNK-LF-TERM", chunks(b"12\r\n" + BODY + b"\n0\r\n\r\n"), EITHER, (400,)),
    Row("CHUNK-LF-TRAILER", chunks(CHUNK + b"0\r\n\n"), EITHER, (400,)),
    Row("CL-COMMA-SAME", post(f"Content-Length: {N}, {N}"), EITHER, (400,)),
    Row("CL-COMMA-TRIPLE", post(f"Content-Length: {N}, {N}, {N}"), EITHER, (400,)),
    Row("EXPECT-100-CL", post(LENGTH, "Expect: 100-continue"), EITHER, (200,)),
    Row(
        "HEAD-CL-BODY",
        get("Content-Length: 5", line="HEAD / HTTP/1.1", body=b"hello"),
        EITHER,
        (200,),
    ),
    Row(
        "OPTIONS-CL-BODY",
        get("Content-Length: 5", line="OPTIONS / HTTP/1.1", body=b"hello"),
        "400 405 2xx",
        (405,),
    ),
    Row("CL-DOUBLE-ZERO", post("Content-Length: 00", body=b""), "400 422 2xx", (422,)),
    Row(
        "CL-LEADING-ZEROS-OCTAL", post("Content-Length: 0022", body=BODY + b" " * 4), EITHER, (200,)
    ),
    Row("ABSOLUTE-URI-HOST-MISMATCH", line("GET http://other.example/ HTTP/1.1"), EITHER, (200,)),
    Row(
        "MULTIPLE-HOST-COMMA",
        b"GET / HTTP/1.1\r\nHost: localhost, other.example\r\n\r\n",
        REJECT,
        (400,),
    ),
    Row(
        "GET-CL-PREFIX-DESYNC",
        get("Content-Length: 16", body=b"GET / HTTP/1.1\r\n") + get(),
        EITHER,
        (200, 200),
    ),
    Row("CL0-BODY-POISON", post("Content-Length: 0", body=b"X") + get(), "400 422", (422, 400)),
    Row("GET-CL-BODY-DESYNC", get("Content-Length: 5", body=b"hello") + get(), EITHER, (200, 200)),
    Row(
        "OPTIONS-CL-BODY-DESYNC",
        get("Content-Length: 5", line="OPTIONS / HTTP/1.1", body=b"hello") + get(),
        "400 405 2xx",
        (405, 200),
    ),
    Row("EXPECT-100-CL-DESYNC", post(LENGTH, "Expect: 100-continue") + get(), EITHER, (200, 200)),
    Row("PIPELINE-SAFE", get() + get(), SERVE, (200, 200)),
]
MALFORMED = [
    Row("BINARY-GARBAGE", bytes(range(128, 256)) * 2, INCOMPLETE, (400,)),
    Row("LONG-URL", line(f"GET /{'A' * 100_000} HTTP/1.1"), "400 414 431", (431,)),
    Row("LONG-HEADER-VALUE", get("X: " + "B" * 100_000), "400 431", (431,)),
    Row("MANY-HEADERS", get(*(f"X-{i}: a" for i in range(10_000))), "400 431", (431,)),
    Row("NUL-IN-URL", line("GET /\0a HTTP/1.1"), REJECT, (400,)),
    Row("CONTROL-CHARS-HEADER", get("X: a\x07\x08\x0bb"), REJECT, (400,)),
    Row("INCOMPLETE-REQUEST", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a", INCOMPLETE, WAIT),
    Row("EMPTY-REQUEST", b"", INCOMPLETE, WAIT),
    Row("LONG-HEADER-NAME", get("A" * 100_000 + ": a"), "400 431", (431,)),
    Row("LONG-METHOD", line("A" * 100_000 + " / HTTP/1.1"), REJECT, (400,)),
    Row("NON-ASCII-HEADER-NAME", get("Xë: a"), REJECT, (400,)),
    Row("NON-ASCII-URL", line("GET /\xc3\xa9 HTTP/1.1"), REJECT, (400,)),
    Row("CL-OVERFLOW", post("Content-Length: 99999999999999999999", body=b""), REJECT, (400,)),
    Row("WHITESPACE-ONLY-LINE", b"   \r\n\r\n", INCOMPLETE, (400,)),
    Row("NUL-IN-HEADER-VALUE", get("X: a\0b"), REJECT, (400,)),
    Row(
        "CHUNK-SIZE-OVERFLOW",
        chunks(b"FFFFFFFFFFFFFFFF0\r\n" + BODY + b"\r\n0\r\n\r\n"),
        REJECT,
        (400,),
    ),
    Row("H2-PREFACE", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", VERSION, (505,)),
    Row("CL-EMPTY", post("Content-Length: ", body=b""), REJECT, (400,)),
    Row("CL-TAB-BEFORE-VALUE", post(f"Content-Length:\t{N}"), EITHER, (200,)),
    Row("URL-BACKSLASH", line("GET /a\\b HTTP/1.1"), "400 404 2xx", (404,)),
    Row("URL-OVERLONG-UTF8", line("GET /\xc0\xaf HTTP/1.1"), REJECT, (400,)),
    Row("URL-PERCENT-NULL", line("GET /a%00.html HTTP/1.1"), "400 404 2xx", (404,)),
    Row("URL-PERCENT-CRLF", line("GET /a%0d%0aX:%20b HTTP/1.1"), "400 404 2xx", (404,)),
    Row(
        "CHUNK-EXT-64K",
        chunks(b"12;a=" + b"a" * 65_536 + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "400 431",
        (400,),
    ),
    Row("RANGE-OVERLAPPING", get("Range: bytes=" + "0-," * 1000 + "0-"), "400 416 431 2xx", (200,)),
    Row("POST-CL-HUGE-NO-BODY", post("Content-Length: 999999999", body=b""), INCOMPLETE, (413,)),
]
NORMALIZATION = [
    Row("UNDERSCORE-CL", post(LENGTH, "Content_Length: 99"), EITHER, (200,)),
    Row("SP-BEFORE-COLON-CL", post(LENGTH, "Content-Length : 5"), EITHER, (400,)),
    Row("TAB-IN-NAME", post(LENGTH, "Content\tLength: 99"), EITHER, (400,)),
    Row("CASE-TE", post(LENGTH, "TRANSFER-ENCODING: chunked"), EITHER, (400,)),
    Row("UNDERSCORE-TE", post(LENGTH, "Transfer_Encoding: chunked"), EITHER, (200,)),
]
ROWS = [*COMPLIANCE, *SMUGGLING, *MALFORMED, *NORMALIZATION]
# Where we answer otherwise than the suite wants, and why
OTHERWISE = {
    "OPTIONS-STAR": "there is nothing that all routes have in common",
    "HOST-EMPTY-VALUE": "RFC 9110, 7.2, wants it of a request whose target has no authority",
    "POST-CL-ZERO": "the route wants JSON, and says so",
    "POST-NO-CL-NO-TE": "the same",
    "CHUNKED-EMPTY": "the same",
    "POST-CL-HUGE-NO-BODY": "413, since it is over max_request_size",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("probed")) as lmi:
        yield lmi


def answers(lmi: Host, data: bytes, ours: tuple[int, ...] = (200,)) -> tuple[list[int], bytes]:
    """The statuses of all answers until the connection closes. A 404 at the end is that of LAST: it
    was kept.
    """
    with socket.create_connection(("127.0.0.1", lmi.port), 60.0) as connection:
        connection.settimeout(SILENCE_S if ours == WAIT else 60.0)
        heard = b""
        try:
            connection.sendall(data if ours == WAIT or ours[-1] in CLOSING else data + LAST)
            while piece := connection.recv(65536):
                heard += piece
        except (TimeoutError, ConnectionError):
            pass

    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", heard)], heard


@pytest.mark.parametrize("row", ROWS, ids=[row.case for row in ROWS])
def test_a_case_of_http11probe_has_our_verdict_and_nothing_hidden_runs(
    server: Host, row: Row
) -> None:
    statuses, heard = answers(server, row.data, row.ours)
    interim = [status for status in statuses if status == 100]
    statuses = [status for status in statuses if status != 100]

    assert tuple(statuses) in (row.ours, (*row.ours, 404)), heard[:300]
    assert not interim or (b"100-continue" in row.data and b"HTTP/1.1\r\n" in row.data)

    if row.ours[-1:] and row.ours[-1] in CLOSING:
        assert b"\r\nconnection: close\r\n" in heard and heard.rstrip().endswith(b"}")


def test_we_answer_as_the_suite_wants_but_where_a_reason_is_given() -> None:
    def is_right(row: Row) -> bool:
        words = row.right.split()
        expectations = (
            ["wait"] if row.ours == WAIT else [f"{row.ours[0]}", f"{row.ours[0] // 100}xx"]
        )
        return bool({*words} & {*expectations})

    assert {row.case for row in ROWS if not is_right(row)} == OTHERWISE.keys()
    assert len({row.case for row in ROWS}) == len(ROWS)


def test_what_answers_must_have_they_have(server: Host) -> None:
    """DATE-HEADER, DATE-FORMAT, CONTENT-TYPE, NO-CL-IN-204 and the Allow of 405."""
    _, heard = answers(server, get())
    assert (
        re.search(rb"\r\ndate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", heard)
        and b"\r\ncontent-type: " in heard
    )
    _, heard = answers(server, line("DELETE / HTTP/1.1"))
    assert b"\r\nallow: " in heard
    _, heard = answers(server, line("HEAD / HTTP/1.1"))
    assert heard.partition(b"\r\n\r\n")[2].startswith(b"HTTP/1.1 404")
