"""The pace on machines whose steps take a known time."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from handlers.lmi_dist.pace import LIMIT_IN_DECODE_STEPS, MIN_CROWD, MIN_PIECE, Pace

MAX_TOKENS = 1024


def machine(num_rows: int, first_s: float = 0.006, row_s: float = 0.0005) -> float:
    """Reading the weights takes `first_s`, and every row its own time."""
    return first_s + num_rows * row_s


def learned(*sizes: int, max_step_s: float | None = None) -> Pace:
    pace = Pace(MAX_TOKENS, max_step_s)
    for size in sizes:
        for _ in range(20):
            pace.note(size, machine(size))

    return pace


def test_a_step_without_decodes_takes_what_it_may() -> None:
    assert (
        Pace(MAX_TOKENS).num_prompt_tokens(0)
        == learned(1, 64, 900).num_prompt_tokens(0)
        == MAX_TOKENS
    )


def test_a_first_step_beside_decodes_takes_one_piece() -> None:
    assert Pace(MAX_TOKENS).num_prompt_tokens(5) == learned(5).num_prompt_tokens(5) == MIN_PIECE
    assert Pace(7).num_prompt_tokens(5) == 7


@pytest.mark.parametrize("num_decodes", [64, 100, 200])
def test_with_decodes_a_step_is_not_much_longer_than_they_are_by_themselves(
    num_decodes: int,
) -> None:
    pace = learned(1, 8, 32, num_decodes, 300, 1000)
    num_tokens = pace.num_prompt_tokens(num_decodes)
    assert machine(num_decodes + num_tokens) <= 1.1 * LIMIT_IN_DECODE_STEPS * machine(num_decodes)
    assert machine(num_decodes + num_tokens) >= 0.9 * LIMIT_IN_DECODE_STEPS * machine(num_decodes)


def test_a_limit_in_time_holds_where_a_piece_fits_in_it() -> None:
    pace = learned(1, 8, 32, 64, 300, 1000, max_step_s=0.1)
    assert machine(64 + pace.num_prompt_tokens(64)) == pytest.approx(0.1, rel=0.1)
    assert learned(64, 300, max_step_s=0.001).num_prompt_tokens(64) == MIN_PIECE


def test_streams_give_way_to_a_crowd_of_prompts() -> None:
    pace = learned(2, 64, 300)
    assert pace.num_prompt_tokens(1, num_prompts=MIN_CROWD) == MAX_TOKENS
    assert pace.num_prompt_tokens(32, num_prompts=32) == MAX_TOKENS
    assert learned(2, 64, 300, max_step_s=0.01).num_prompt_tokens(2, num_prompts=62) == MIN_PIECE


def test_streams_do_not_give_way_to_a_few_prompts_or_to_fewer_than_they_are() -> None:
    pace = learned(1, 8, 64, 300)
    assert pace.num_prompt_tokens(1, num_prompts=MIN_CROWD - 1) == MIN_PIECE
    assert pace.num_prompt_tokens(8, num_prompts=7) == MIN_PIECE


def test_one_step_that_lost_its_core_changes_little() -> None:
    pace = learned(8, 64, 300)
    before = pace.num_prompt_tokens(64)
    pace.note(64, 30.0)
    assert pace.seconds(64) < 2 * machine(64)
    for _ in range(20):
        pace.note(64, machine(64))

    assert pace.num_prompt_tokens(64) == pytest.approx(before, abs=2)


def test_a_machine_that_gets_slower_is_followed() -> None:
    pace = learned(8, 64, 300)
    for _ in range(60):
        for size in (8, 64, 300):
            pace.note(size, 3 * machine(size))

    assert pace.seconds(64) == pytest.approx(3 * machine(64), rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 10)), max_size=50), st.integers(0, 500)
)
def test_any_measurements_give_a_number_of_tokens_in_bounds(
    steps: list[tuple[int, float]], num_decodes: int
) -> None:
    pace = Pace(MAX_TOKENS)
    for num_rows, seconds in steps:
        pace.note(num_rows, seconds)

    assert MIN_PIECE <= pace.num_prompt_tokens(num_decodes) <= MAX_TOKENS
    assert 0 <= pace.seconds(num_decodes + 1) <= pace.seconds(num_decodes + 2)
