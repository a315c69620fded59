"""The parts of a multipart/form-data body by name. Source: RFC 2046, section 5.1.1, and RFC 7578."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser


def is_multipart(content_type: str | None) -> bool:
    return content_type is not None and content_type.strip().lower().startswith("multipart/form-data")


def read_parts(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the name and bytes of each part, including files, in order. Raises ValueError for a malformed body."""
    boundary = _message("content-type: " + content_type).get_boundary()
    if not boundary:
        raise ValueError("the content type of a multipart body must name its boundary")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) == 1:
        raise ValueError(f"the multipart body has no line with its boundary, {boundary!r}")
    if not pieces[-1].startswith(b"--"):
        raise ValueError("the multipart body ends before its last boundary")
    return list(map(_part, _without_padding(pieces[1:-1])))


def _without_padding(pieces: list[bytes]) -> Iterator[bytes]:
    """Yield the pieces without the rest of the boundary's line, which may hold only blanks."""
    for piece in pieces:
        padding, line_end, part = piece.partition(b"\r\n")
        if not line_end or padding.strip(b" \t"):
            raise ValueError("a boundary of the multipart body does not end its line")
        yield b"\r\n" + part


def _part(part: bytes) -> tuple[str, bytes]:
    head, head_end, content = part.partition(b"\r\n\r\n")
    name = _message(head.decode(errors="replace").lstrip()).get_param("name", header="content-disposition")
    if not head_end or not isinstance(name, str):
        raise ValueError("a part of the multipart body has no name")
    return name, content


def _message(head: str) -> Message:
    return HeaderParser().parsestr(head)
