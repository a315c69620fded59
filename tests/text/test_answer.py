from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.executor import FinishReason, PromptLogProb, SamplingConfig, TokenLogProb
from lmi.text.answer import AnswerText, prompt_tokens
from lmi.text.tokenizer import Tokenizer
from lmi.types import GenerationRequest, Token

END = 0  # <|endoftext|>
LENGTH = FinishReason.LENGTH
END_ID = FinishReason.END_ID
STOP_WORDS = FinishReason.STOP_WORDS


def answer(tokenizer: Tokenizer, min_tokens: int = 0, **asked: Any) -> AnswerText:
    request = GenerationRequest(
        max_new_tokens=None, sampling=SamplingConfig(min_tokens=min_tokens), **asked
    )
    return AnswerText(tokenizer, request, tokenizer.encode("The quick"))


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def read(text: AnswerText, ids: list[int], size: int, reason: FinishReason) -> list[Token]:
    """Read the answer of an engine that sends `size` tokens at a time."""
    tokens: list[Token] = []
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        tokens += text.feed(
            ids[start : start + size], finish_reason=reason if last else FinishReason.NOT_FINISHED
        )
        if text.stop_string is not None:
            break

    return tokens


@given(
    text=st.text(min_size=1, max_size=30),
    stop=st.text(min_size=1, max_size=3),
    size=st.integers(1, 8),
)
def test_the_pieces_are_the_text_up_to_the_stop_string(
    byte_level: Tokenizer, text: str, stop: str, size: int
) -> None:
    answer_text = answer(byte_level, stop_sequences=[stop])
    tokens = read(answer_text, byte_level.encode(text), size, LENGTH)
    whole = byte_level.decode(byte_level.encode(text), skip_special_tokens=True)

    assert text_of(tokens) == whole.partition(stop)[0]
    assert (answer_text.stop_string is not None) == (stop in whole)


def test_tokens_carry_what_the_engine_said(byte_level: Tokenizer) -> None:
    first = byte_level.encode("The")
    second = byte_level.encode(" dog")
    ids = [first[0], second[0]]
    tokens = answer(byte_level).feed(
        ids, [-0.5, -1.5], [[TokenLogProb(ids[0], -0.5)], [TokenLogProb(END, -0.25)]]
    )

    assert [(token.id, token.log_prob, token.is_special) for token in tokens] == [
        (ids[0], -0.5, False),
        (ids[1], -1.5, False),
    ]
    assert tokens[0].top == [Token(ids[0], byte_level.token_text(ids[0]), -0.5)]
    assert tokens[1].top == [Token(END, "<|endoftext|>", -0.25, True)]


def test_tokens_behind_a_stop_string_are_dropped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one STOP two")
    text = answer(byte_level, stop_sequences=["STOP"])
    tokens = text.feed(ids)
    assert (text_of(tokens), text.stop_string is not None) == ("one ", True)
    assert len(tokens) == len(byte_level.encode("one STOP"))
    assert text.feed(ids, finish_reason=LENGTH) == []


def test_an_included_stop_string_is_shown(byte_level: Tokenizer) -> None:
    text = answer(byte_level, stop_sequences=["STOP"], include_stop_str_in_output=True)
    assert text_of(text.feed(byte_level.encode("one STOP two"))) == "one STOP"


@pytest.mark.parametrize("skip", [True, False])
def test_the_end_token_is_the_last_token_without_text(byte_level: Tokenizer, skip: bool) -> None:
    ids = [*byte_level.encode("done"), END]
    tokens = answer(byte_level, skip_special_tokens=skip).feed(ids, finish_reason=END_ID)

    assert (tokens[-1].id, tokens[-1].text, tokens[-1].is_special) == (END, "", True)
    assert text_of(tokens) == "done"


@pytest.mark.parametrize("size", [1, 5])
def test_a_token_without_text_in_the_answer_has_a_name(byte_level: Tokenizer, size: int) -> None:
    """But part of a character has none, as in vLLM: its text is the whole character's."""
    ids = [*byte_level.encode("😀"), byte_level.encode("<|im_start|>")[0], END]
    tokens = read(answer(byte_level), ids, size, END_ID)

    assert [token.spelled_name for token in tokens] == [
        "",
        "",
        "😀",
        "<|im_start|>",
        "<|endoftext|>",
    ]
    assert text_of(tokens) == "😀"

    stop = byte_level.encode("b")[0]
    [token] = answer(byte_level, stop_token_ids=[stop]).feed([stop], finish_reason=STOP_WORDS)

    assert (token.text, token.spelled_name) == ("", "b")


def test_a_prompt_is_decoded_as_its_answer_is(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode("hi 😀 x", add_special_tokens=False)
        tokens = prompt_tokens(tokenizer, ids, None)
        assert text_of(tokens) == tokenizer.decode(ids) == "hi 😀 x"
        assert "😀" in [token.text for token in tokens]
        assert text_of(prompt_tokens(tokenizer, ids[:3], None)) == tokenizer.decode(ids[:3]), (
            "its last character is cut"
        )


def test_an_end_token_that_did_not_end_the_answer_is_an_ordinary_one(byte_level: Tokenizer) -> None:
    tokens = answer(byte_level, skip_special_tokens=False).feed([END, END], finish_reason=LENGTH)
    assert text_of(tokens) == "<|endoftext|>" * 2


@pytest.mark.parametrize(("is_included", "expected"), [(False, "a"), (True, "ab")])
def test_a_stop_token_has_no_text_unless_it_is_included(
    byte_level: Tokenizer, is_included: bool, expected: str
) -> None:
    first = byte_level.encode("a")[0]
    stop = byte_level.encode("b")[0]
    text = answer(byte_level, stop_token_ids=[stop], include_stop_str_in_output=is_included)
    tokens = text.feed([first]) + text.feed([stop], finish_reason=STOP_WORDS)

    assert (text_of(tokens), tokens[-1].is_special) == (expected, False)


@pytest.mark.parametrize("reason", [LENGTH, END_ID])
def test_text_held_back_stands_in_the_last_token(
    byte_level: Tokenizer, reason: FinishReason
) -> None:
    text = answer(byte_level, stop_sequences=["STOP"])
    half = byte_level.encode("👀")[0]

    assert text_of(text.feed(byte_level.encode("one STO"))) == "one "

    tokens = text.feed([half, END], finish_reason=reason)
    assert (tokens[0].text, tokens[-1].text) == ("", "STO\ufffd")


def test_text_held_back_is_not_lost_when_the_last_result_has_no_tokens(
    byte_level: Tokenizer,
) -> None:
    text = answer(byte_level, stop_sequences=["STOP"])
    ids = byte_level.encode("STO")
    assert text_of(text.feed(ids)) == ""
    assert text.feed([], finish_reason=LENGTH) == [Token(ids[-1], "STO", raw_text="")], (
        "they have been spelled"
    )
    assert answer(byte_level).feed([], finish_reason=LENGTH) == []


def test_half_a_character_is_spelled_with_a_stop_string_as_without(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("one"), byte_level.encode("👀")[0]]
    plain, stopped = (
        answer(byte_level, stop_sequences=stop).feed(ids, finish_reason=LENGTH)
        for stop in ([], ["X"])
    )
    assert [token.spelling for token in plain] == [token.spelling for token in stopped]
    assert stopped[-1].spelling == "\ufffd"


def test_a_stop_string_may_be_found_in_the_text_held_back(byte_level: Tokenizer) -> None:
    text = answer(byte_level, stop_sequences=["\ufffd"])
    tokens = text.feed(
        [*byte_level.encode("one"), byte_level.encode("👀")[0]], finish_reason=LENGTH
    )
    assert (text_of(tokens), text.stop_string is not None) == ("one", True)


def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("b b b")
    text = answer(byte_level, stop_sequences=["b"], min_tokens=2)
    expected = text_of(answer(byte_level).feed(ids[:2]))
    tail = text_of(answer(byte_level).feed(ids[2:])).partition("b")[0]
    assert text_of(text.feed(ids)) == expected + tail
    assert text.stop_string is not None


def test_prompt_tokens_carry_their_log_probs(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("The")
    alone = prompt_tokens(sentencepiece, ids, None)

    assert (text_of(alone), alone[0].text, alone[0].is_special, alone[-1].log_prob) == (
        "<s> The",
        "<s>",
        True,
        None,
    )

    positions = [
        PromptLogProb(None),
        *[PromptLogProb(-1.0, [TokenLogProb(2, -0.1)]) for _ in ids[1:]],
    ]
    tokens = prompt_tokens(sentencepiece, ids, positions)

    assert (tokens[0].log_prob, tokens[0].top) == (None, None)
    assert (tokens[1].log_prob, tokens[1].top) == (-1.0, [Token(2, "</s>", -0.1, True)])
