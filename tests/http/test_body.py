"""The budget of request bodies in numbers: which bodies are refused, and which do not keep others
out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.errors import Overloaded
from lmi.http.body import SMALL_BODY_BYTES, BodyMemory
from lmi.shared.state import Block, FrontEndRecord

MAX_BYTES = 16 * SMALL_BODY_BYTES


@pytest.fixture
def record(tmp_path: Path) -> FrontEndRecord:
    return Block.create(tmp_path / "state", num_engines=1, num_frontends=1).frontends[0]


def test_a_body_of_the_whole_budget_passes_beside_small_ones(record: FrontEndRecord) -> None:
    memory = BodyMemory(record, MAX_BYTES)
    for _ in range(2):
        memory.change(0, SMALL_BODY_BYTES)

    memory.check_room(0, MAX_BYTES)
    memory.change(0, SMALL_BODY_BYTES)
    with pytest.raises(Overloaded, match=f"{MAX_BYTES} bytes .*max_body_memory"):
        memory.check_room(0, MAX_BYTES)


def test_small_bodies_pass_beside_large_ones_and_are_bounded_too(record: FrontEndRecord) -> None:
    memory = BodyMemory(record, MAX_BYTES)
    memory.change(0, MAX_BYTES)
    with pytest.raises(Overloaded):
        memory.check_room(0, SMALL_BODY_BYTES + 1)

    for _ in range(2):
        memory.check_room(0, SMALL_BODY_BYTES)
        memory.change(0, SMALL_BODY_BYTES)

    with pytest.raises(Overloaded):
        memory.check_room(0, 1)


def test_a_body_counts_once_however_it_grows_and_not_when_it_has_gone(
    record: FrontEndRecord,
) -> None:
    memory = BodyMemory(record, MAX_BYTES)
    for num_before, num_after in [(0, 10), (10, SMALL_BODY_BYTES), (SMALL_BODY_BYTES, MAX_BYTES)]:
        memory.check_room(num_before, num_after)
        memory.change(num_before, num_after)
        assert record.num_body_bytes == num_after

    memory.change(MAX_BYTES, 0)
    assert record.num_body_bytes == 0
    memory.check_room(0, MAX_BYTES)
