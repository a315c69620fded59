from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from lmi.text.answer import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text("ab", max_size=4) | st.just("c"), max_size=12)


def read(stop: StopStrings, pieces: list[str]) -> str:
    return "".join([stop.feed(piece) for piece in pieces] + [stop.flush()])


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule in plain code: the first end of a stop string, and the longest one that
    ends there.
    """
    for end in range(1, len(text) + 1):
        stops_found = [stop for stop in stops if text[:end].endswith(stop)]
        if stops_found:
            longest = max(stops_found, key=len)
            return text[: end - len(longest)], longest

    return text, None


@pytest.mark.parametrize("cut", range(len("one STOP two") + 1))
def test_a_stop_string_is_found_wherever_the_text_is_cut(cut: int) -> None:
    stop = StopStrings(["STOP"])
    text = read(stop, ["one STOP two"[:cut], "one STOP two"[cut:]])
    assert (text, stop.matched) == ("one ", "STOP")


@settings(max_examples=500)
@example(["aab"], ["aa", "ab"])
@example(["b", "ab", "bb"], ["a", "b"])
@given(STOPS, PIECES)
def test_the_cut_of_the_text_changes_nothing(stops: list[str], pieces: list[str]) -> None:
    stop = StopStrings(stops)
    assert (read(stop, pieces), stop.matched) == first_stop("".join(pieces), stops)


@given(STOPS, PIECES)
def test_only_a_possible_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    stop = StopStrings(stops)
    text_seen = released = ""
    for piece in pieces:
        text_seen += piece
        released += stop.feed(piece)
        if stop.matched is not None:
            return

        beginnings = [n for s in stops for n in range(1, len(s)) if text_seen.endswith(s[:n])]
        assert released == text_seen[: len(text_seen) - max(beginnings, default=0)]


@given(STOPS, PIECES)
def test_an_included_stop_string_ends_the_text(stops: list[str], pieces: list[str]) -> None:
    stop = StopStrings(stops, include_stop_str_in_output=True)
    text, matched = first_stop("".join(pieces), stops)
    assert read(stop, pieces) == text + (matched or "")


def test_nothing_comes_after_a_stop_string() -> None:
    stop = StopStrings(["\n\n"])
    assert [stop.feed("a\n"), stop.feed("\nb"), stop.feed("c"), stop.flush()] == ["a", "", "", ""]


@pytest.mark.parametrize("stop", ["]", "^", "-", "\\", "[a-z]", ".", "終わり", "👍🏽"])
def test_a_stop_string_is_no_pattern(stop: str) -> None:
    stops = StopStrings([stop])
    assert (read(stops, ["ab^-", stop[:1], stop[1:], "c"]), stops.matched) == first_stop(
        f"ab^-{stop}c", [stop]
    )
