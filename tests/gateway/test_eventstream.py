"""Frames of AWS's event stream against botocore's own reader, and the three ways to cut a stream
into parts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import given, strategies as st

from lmi.gateway import eventstream
from lmi.gateway.eventstream import MAX_PART_BYTES, AsIs, Coalesced, Parts, Split, parse_parts

GOLDEN = (
    "0000006b00000059997770650b3a6576656e742d7479706507000b5061796c6f6164506172740d3a636f6e74656e742d74797065070018"
    "6170706c69636174696f6e2f6f637465742d73747265616d0d3a6d6573736167652d747970650700056576656e746869f0e10a16"
)
CHUNKS = st.lists(st.binary(min_size=1, max_size=60), max_size=20)


class Chunks:
    """A body that is there already, or comes with pauses."""

    def __init__(self, chunks: Sequence[bytes], pauses_s: Sequence[float] = ()) -> None:
        self._chunks = list(chunks)
        self._pauses_s = list(pauses_s)

    async def receive(self) -> bytes:
        if self._pauses_s:
            await asyncio.sleep(self._pauses_s[0])
            self._pauses_s.pop(0)

        return self._chunks.pop(0) if self._chunks else b""


def cut(mode: Parts, chunks: Sequence[bytes], pauses_s: Sequence[float] = ()) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [part async for part in mode.cut(Chunks(chunks, pauses_s))]

    return asyncio.run(collect())


def test_the_golden_frame() -> None:
    assert eventstream.part(b"hi").hex() == GOLDEN


@given(st.lists(st.binary(max_size=300), max_size=10), st.data())
def test_botocore_reads_every_payload_however_the_bytes_are_cut(
    payloads: list[bytes], data: st.DataObject
) -> None:
    wire = b"".join(map(eventstream.part, payloads))
    buffer = EventStreamBuffer()
    events = []
    ends = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    for begin, end in zip([0, *ends], [*ends, len(wire)], strict=True):
        buffer.add_data(wire[begin:end])
        events += [event.to_response_dict() for event in buffer]

    assert [event["body"] for event in events] == payloads
    assert all(event["status_code"] == 200 for event in events)
    assert all(event["headers"][":event-type"] == "PayloadPart" for event in events)


def test_botocore_reads_a_failure_as_an_exception() -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(eventstream.failure("StreamBroken", "It broke, “so”."))
    [event] = [event.to_response_dict() for event in buffer]
    assert event["status_code"] == 400
    assert event["headers"][":exception-type"] == "ModelStreamError"
    assert json.loads(event["body"]) == {"Message": "It broke, “so”.", "ErrorCode": "StreamBroken"}


@given(CHUNKS)
def test_as_is_keeps_the_bounds_of_chunks(chunks: list[bytes]) -> None:
    assert cut(AsIs(), chunks) == chunks


@given(CHUNKS, st.integers(1, 40))
def test_split_cuts_at_every_so_many_bytes_and_keeps_all(
    chunks: list[bytes], num_bytes: int
) -> None:
    parts = cut(Split(num_bytes), chunks)
    assert b"".join(parts) == b"".join(chunks)
    assert all(len(part) == num_bytes for part in parts[:-1])
    assert all(parts)


@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=60), st.sampled_from([0.0, 0.0, 0.003])),
        max_size=8,
    )
)
def test_coalesce_keeps_all_bytes_whatever_the_times(timed: list[tuple[bytes, float]]) -> None:
    chunks = [chunk for chunk, _ in timed]
    pauses_s = [pause_s for _, pause_s in timed]
    parts = cut(Coalesced(0.002), chunks, pauses_s)
    assert b"".join(parts) == b"".join(chunks)
    assert all(parts)


def test_coalesce_joins_what_comes_within_its_time_and_no_more() -> None:
    assert cut(Coalesced(0.1), [b"a", b"b", b"c"], [0.0, 0.0, 0.3]) == [b"ab", b"c"]


def test_coalesce_gives_what_it_has_at_the_end_at_once() -> None:
    started_s = time.monotonic()
    assert cut(Coalesced(30.0), [b"a", b"b"]) == [b"ab"]
    assert time.monotonic() - started_s < 5


def test_no_part_is_longer_than_a_mebibyte() -> None:
    chunks = [b"x" * MAX_PART_BYTES, b"y" * 700_000, b"z" * 700_000]
    for mode in (AsIs(), Coalesced(), Split(MAX_PART_BYTES)):
        parts = cut(mode, chunks)
        assert b"".join(parts) == b"".join(chunks)
        assert max(map(len, parts)) <= MAX_PART_BYTES


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("as-is", AsIs()),
        ("coalesce", Coalesced(0.05)),
        ("coalesce:200", Coalesced(0.2)),
        ("split", Split(7)),
        ("split:3", Split(3)),
    ],
)
def test_a_mode_is_a_word_with_a_number(text: str, mode: Parts) -> None:
    assert parse_parts(text) == mode


@pytest.mark.parametrize(
    "text", ["", "asis", "as-is:1", "coalesce:0", "coalesce:x", "split:-1", f"split:{1 << 21}"]
)
def test_other_modes_are_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be as-is, coalesce\[:MS\]"):
        parse_parts(text)
