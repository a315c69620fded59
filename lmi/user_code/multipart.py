"""The content type of a body, and the parts of a multipart one, which an Input has under their
names.
"""

from collections.abc import Mapping
from email.message import Message
from email.parser import HeaderParser


def content_type_of(headers: Mapping[str, str]) -> str | None:
    """Return the header's value. Its name may have any case."""
    for name, value in headers.items():
        if name.lower() == "content-type":
            return value

    return None


def is_multipart(content_type: str) -> bool:
    return content_type.strip().lower().startswith("multipart/form-data")


def read_parts(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the name and bytes of each part, including files, in order. Raises ValueError for a
    malformed body.
    """
    boundary = _headers("content-type: " + content_type).get_boundary()
    if not boundary:
        raise ValueError("the content type of a multipart body must name its boundary")

    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) == 1:
        raise ValueError(f"the multipart body has no line with its boundary, {boundary!r}")

    if not pieces[-1].startswith(b"--"):
        raise ValueError("the multipart body ends before its last boundary")

    parts = []
    for piece in pieces[1:-1]:
        padding, line_end, part = piece.partition(b"\r\n")
        if not line_end or padding.strip(b" \t"):
            raise ValueError("a boundary of the multipart body does not end its line")

        head, head_end, content = (b"\r\n" + part).partition(b"\r\n\r\n")
        headers = _headers(head.decode(errors="replace").lstrip())
        name = headers.get_param("name", header="content-disposition")
        if not head_end or not isinstance(name, str):
            raise ValueError("a part of the multipart body has no name")

        parts.append((name, content))

    return parts


def _headers(head: str) -> Message:
    return HeaderParser().parsestr(head)
