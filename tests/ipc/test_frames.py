"""Frames come out whole for bytes in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lmi.ipc import MAX_FRAME_BYTES, FrameReader, FrameTooLarge, frame


@given(payloads=st.lists(st.binary(max_size=40), max_size=8), cut=st.integers(1, 17))
def test_frames_fed_in_any_pieces_are_the_frames_that_were_sent(
    payloads: list[bytes], cut: int
) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader()
    out = [
        whole for at in range(0, len(stream), cut) for whole in reader.feed(stream[at : at + cut])
    ]
    assert out == payloads


def test_an_announced_length_over_the_limit_is_refused_before_the_bytes_come() -> None:
    with pytest.raises(FrameTooLarge, match="at most 67108864 bytes, this one 67108865"):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
