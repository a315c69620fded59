"""Bytes of a client become messages of the event stream, however they are cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings, strategies as st

from lmi.gateway.errors import AwsError
from lmi.gateway.event_message import EventMessage, MessageReader, Timestamp
from lmi.gateway.eventstream import encode_headers, frame

NAMES = st.text("abc:-", min_size=1, max_size=8)
TEXTS = st.dictionaries(NAMES, st.text(max_size=20), max_size=5)


def read(data: bytes) -> EventMessage:
    reader = MessageReader(len(data))
    reader.feed(data)
    message = reader.take()
    assert message is not None
    return message


@settings(max_examples=50)
@given(st.lists(st.tuples(TEXTS, st.binary(max_size=200)), max_size=5), st.integers(1, 50))
def test_messages_are_read_however_their_bytes_are_cut(
    messages: list[tuple[dict[str, str], bytes]], num_bytes: int
) -> None:
    wire = b"".join(frame(encode_headers(headers), payload) for headers, payload in messages)
    reader = MessageReader(1 << 20)
    taken = []
    for begin in range(0, len(wire), num_bytes):
        reader.feed(wire[begin : begin + num_bytes])
        while (message := reader.take()) is not None:
            taken.append((message.headers, message.payload))

    assert taken == messages
    assert reader.num_unread_bytes == 0


def test_headers_of_every_type_are_read() -> None:
    encoded = b"".join(
        (
            b"\x01a\x00",
            b"\x01b\x01",
            b"\x01c\x02\xff",
            b"\x01d\x03\x01\x00",
            b"\x01e\x04" + struct.pack("!i", -5),
            b"\x01f\x05" + struct.pack("!q", 1 << 40),
            b"\x01g\x06\x00\x02\x00\xff",
            b"\x01h\x07\x00\x02\xc3\xa9",
            b"\x01i\x08" + struct.pack("!q", 1234),
            b"\x01j\x09" + bytes(16),
        )
    )
    headers = read(frame(encoded, b"")).headers
    values = (True, False, -1, 256, -5, 1 << 40, b"\x00\xff", "é", 1234, bytes(16))
    assert tuple(headers.values()) == values
    assert isinstance(headers["i"], Timestamp)


@settings(max_examples=50)
@given(st.binary(max_size=60))
def test_headers_that_are_none_are_refused_or_read(encoded: bytes) -> None:
    try:
        read(frame(encoded, b""))
    except AwsError as error:
        assert "a message is broken" in str(error)


@pytest.mark.parametrize(
    ("encoded", "rule"),
    [
        (b"\x01a\x0a", "type 10"),
        (b"\x05a", "cut"),
        (b"\x01a\x07\xff\xff", "cut"),
        (b"\x01\xff\x00", "UTF-8"),
        (b"\x01a\x00\x01a\x00", "comes twice"),
    ],
)
def test_a_broken_header_is_refused_with_its_rule(encoded: bytes, rule: str) -> None:
    with pytest.raises(AwsError, match=rule):
        read(frame(encoded, b""))
