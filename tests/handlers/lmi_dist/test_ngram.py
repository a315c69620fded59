"""Drafts by lookup: what they propose, and when they are worth computing."""

from __future__ import annotations

import random

from hypothesis import given, strategies as st

from handlers.lmi_dist.drafts import (
    MAX_DRAFT,
    MAX_LOOKS,
    MAX_NGRAM,
    Drafter,
    PossibleDraft,
    num_worth,
)
from handlers.lmi_dist.pace import Pace

CHEAP = {1: 0.010, 8: 0.011, 64: 0.02, 512: 0.1}
FULL = {1: 0.001, 8: 0.008, 64: 0.064, 512: 0.512}


def pace_of(times: dict[int, float]) -> Pace:
    pace = Pace(1024)
    for num_rows, seconds in times.items():
        pace.note(num_rows, seconds)

    return pace


def drafted(token_ids: list[int]) -> list[int]:
    """The draft of a sequence that grew token by token."""
    drafter = Drafter()
    drafts = [drafter.draft(token_ids[:end]) for end in range(1, len(token_ids) + 1)]
    return drafts[-1]


def test_a_draft_is_what_followed_the_last_time() -> None:
    assert drafted([1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 2, 3]) == [4, 5, 6, 7, 8, 9, 20]
    assert drafted([1, 2, 3, 40, 7, 2, 3, 50, 60, 70, 80, 90, 95, 99, 2, 3])[:2] == [50, 60]


def test_a_longer_match_comes_before_a_later_one() -> None:
    assert drafted([9, 1, 2, 3, 40, 41, 5, 2, 3, 50, 51, 1, 2, 3])[0] == 40


def test_a_sequence_without_a_repetition_has_no_draft() -> None:
    assert drafted(list(range(100))) == drafted([1]) == drafted([1, 1]) == []


def test_a_loop_goes_on_in_the_draft() -> None:
    assert drafted([7, 7, 7]) == [7] * MAX_DRAFT
    assert drafted([1, 2, 3, 1, 2, 3, 1, 2]) == [3, 1, 2, 3, 1, 2, 3]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_draft_follows_the_latest_of_the_longest_matches_among_the_latest_of_its_pair(
    token_ids: list[int],
) -> None:
    pairs = [end for end in range(2, len(token_ids)) if token_ids[end - 2 : end] == token_ids[-2:]][
        -MAX_LOOKS:
    ]
    matches = (
        [
            end
            for end in pairs
            if end >= length and token_ids[end - length : end] == token_ids[-length:]
        ]
        for length in range(MAX_NGRAM, 1, -1)
    )
    expected = next((token_ids[ends[-1]] for ends in matches if ends), None)
    draft = drafted(token_ids)

    assert draft[:1] == ([] if expected is None else [expected])
    assert len(draft) in (0, MAX_DRAFT)


def test_drafts_pay_where_rows_are_cheap_and_the_drafts_are_right() -> None:
    right = PossibleDraft(Drafter(), [1] * MAX_DRAFT)
    wrong = PossibleDraft(Drafter(), [1] * MAX_DRAFT)
    for _ in range(50):
        right.drafter.note(7, 7)
        wrong.drafter.note(0, 7)

    assert num_worth([right], 1, pace_of(CHEAP)) == 1
    assert num_worth([wrong], 1, pace_of(CHEAP)) == 0
    assert num_worth([right, wrong], 8, pace_of(CHEAP)) == 1
    assert num_worth([right], 1, pace_of(FULL)) == 0, "a row costs as much as a step"
    assert num_worth([right], 1, Pace(1024)) == 0, "nothing is known of the machine"
    assert num_worth([], 1, pace_of(CHEAP)) == 0


def test_a_sequence_whose_drafts_were_wrong_gets_another_chance() -> None:
    drafter = Drafter()
    pace = pace_of(CHEAP)
    for _ in range(50):
        drafter.note(0, 7)

    num_rests = 0
    while not num_worth([PossibleDraft(drafter, [1] * MAX_DRAFT)], 1, pace):
        drafter.rest()
        num_rests += 1

    assert 0 < num_rests < 200


def test_the_index_of_a_long_sequence_is_made_once() -> None:
    choice = random.Random(1)
    token_ids = choice.choices(range(50), k=3000)
    drafter = Drafter()
    drafter.draft(token_ids[:2000])
    assert drafter.draft(token_ids) == drafted(token_ids)
