"""Each text of an answer has the log-probs of the tokens that wrote it, however the answer was cut
into parts.
"""

from lmi.apis.responses.log_probs import TextLogProbs
from lmi.types import Token

ANSWER = ["<think>", "h", "m", "</think>He", "l", "", "lo", "<tool", "_call>", "{}", ""]


def tokens_of(texts: list[str]) -> TextLogProbs:
    tokens = TextLogProbs()
    tokens.add(
        [Token(id=n, text=text) for n, text in enumerate(texts)],
        [{"token": n} for n in range(len(texts))],
    )
    return tokens


def numbers(log_probs: list[dict[str, int]]) -> list[int]:
    return [log_prob["token"] for log_prob in log_probs]


def test_marks_and_thoughts_are_left_out_and_a_token_may_end_one_part_and_begin_the_next() -> None:
    tokens = tokens_of(ANSWER)
    assert tokens.take("hm", is_text=False) == []
    assert numbers(tokens.take("Hello", is_text=True)) == [3, 4, 5, 6]
    assert tokens.take("{}", is_text=False) == []
    assert numbers(tokens.rest()) == [10]


def test_a_token_whose_text_comes_in_two_pieces_is_told_once() -> None:
    tokens = tokens_of(["Hello", " you"])
    assert numbers(tokens.take("Hel", is_text=True)) == [0]
    assert numbers(tokens.take("lo y", is_text=True)) == [1]
    assert numbers(tokens.take("ou", is_text=True)) == []


def test_a_part_that_is_written_anew_has_no_log_probs() -> None:
    tokens = tokens_of(["{'a'", ": 1}"])
    assert tokens.take('{"a": 1}', is_text=True) == [] and tokens.rest() == []
