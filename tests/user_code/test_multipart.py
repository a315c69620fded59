"""Multipart bodies: the content of each part is unchanged, and a body that is not a form is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi.user_code.multipart import is_multipart, read_parts

TYPE = 'multipart/form-data; boundary="cut"'


def part(content: bytes, head: str = 'content-disposition: form-data; name="data"') -> bytes:
    return b"--cut\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


@given(st.lists(st.binary().filter(lambda content: b"--cut" not in content), max_size=4))
def test_every_byte_of_every_part_comes_out(contents: list[bytes]) -> None:
    body = b"a preamble\r\n" + b"".join(map(part, contents)) + b"--cut--\r\nan epilogue"
    assert read_parts(body, TYPE) == [("data", content) for content in contents]


def test_parts_have_their_names_files_too() -> None:
    file = 'Content-Type: image/png\r\nContent-Disposition: form-data; filename="a.png"; name="größe"'
    body = part(b"\r\n\x00", file) + part(b'{"a": 1}', "content-disposition: form-data; name=json") + b"--cut--"
    assert read_parts(body, "Multipart/Form-Data; charset=utf-8; boundary=cut") == [
        ("größe", b"\r\n\x00"),
        ("json", b'{"a": 1}'),
    ]


def test_blanks_may_follow_a_boundary() -> None:
    assert read_parts(part(b"a").replace(b"--cut\r\n", b"--cut \t\r\n") + b"--cut--", TYPE) == [("data", b"a")]


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (part(b"a") + b"--cut--", "multipart/form-data", "must name its boundary"),
        (b"{}", TYPE, "has no line with its boundary, 'cut'"),
        (b"", TYPE, "has no line with its boundary"),
        (part(b"a"), TYPE, "ends before its last boundary"),
        (b"--cutter\r\n\r\n--cut--", TYPE, "does not end its line"),
        (part(b"a", "content-type: text/plain") + b"--cut--", TYPE, "has no name"),
        (b"--cut\r\nno head--cut\r\n--cut--", TYPE, "has no name"),
    ],
)
def test_what_is_no_form_says_why(body: bytes, content_type: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_parts(body, content_type)


def test_only_forms_are_taken_apart() -> None:
    assert is_multipart("multipart/form-data; boundary=a") and not is_multipart("multipart/mixed; boundary=a")
    assert not is_multipart(None) and not is_multipart("application/json")
