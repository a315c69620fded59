"""Thoughts are separated from the answer, for a text in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.parts.answer_parts import AnswerParts
from lmi.apis.openai.parts.buffer import Text, Thought
from lmi.apis.openai.parts.thoughts import THOUGHT_MARKS
from lmi.settings.annexes import REASONING_FORMS
from lmi.types import AnswerEnd

# name: prompt, answer, thought, rest of the answer
ANSWERS = {
    "no thought": ("", "Hello <b>", "", "Hello <b>"),
    "a thought": ("", "<think>\nI see.\n</think>\n\nHello", "I see.", "Hello"),
    "white space before the mark": ("", " \n<think>a b</think>c", "a b", "c"),
    "an empty thought": ("", "<think>\n\n</think>\n\nHi", "", "Hi"),
    "opened by the prompt": ("<|assistant|><think>\n", "I see.\n</think>\nHi", "I see.", "Hi"),
    "opened twice": ("<think>\n", "<think>x</think>y", "x", "y"),
    "cut inside": ("", "<think>I was abo", "I was abo", ""),
    "cut inside what the prompt opened": ("<think>", "<thin", "<thin", ""),
    "cut inside the closing mark": ("", "<think>a </thi", "a </thi", ""),
    "a mark that never became one": ("", "<thin", "", "<thin"),
    "a mark in the middle": ("", "so <think>x</think>", "", "so <think>x</think>"),
    "a second thought is text": ("", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    "the white space of an answer": ("", "  \n ", "", "  \n "),
    "less-than signs": ("", "<think>a < b << c</think>d", "a < b << c", "d"),
}


def reasoning(prompt: str = "", form: str = "think") -> AnswerParts:
    return AnswerParts.of(OpenAIFormat(model="m", reasoning=form), prompt)


def split(prompt: str, pieces: list[str]) -> tuple[str, str]:
    reader = reasoning(prompt)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.feed(
        "", AnswerEnd.EOS_TOKEN
    )
    texts = {
        kind: "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (Thought, Text)
    }
    return texts[Thought], texts[Text]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_parted_whole_and_by_single_characters(name: str) -> None:
    prompt, answer, thought, text = ANSWERS[name]
    assert split(prompt, [answer]) == (thought, text)
    assert split(prompt, list(answer)) == (thought, text)


@pytest.mark.parametrize("form", THOUGHT_MARKS)
def test_each_form_has_its_own_marks(form: str) -> None:
    opening, closing = THOUGHT_MARKS[form]
    assert reasoning(f"<|assistant|>{opening}", form).feed(f"a <b>{closing}c") == [
        Thought("a <b>"),
        Text("c"),
    ]
    # Of the former is tests/apis/openai/test_harmony.py
    special_forms = {"openai", "none"}
    assert set(THOUGHT_MARKS) == set(REASONING_FORMS) - special_forms


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a"])),
    st.booleans(),
)
def test_where_the_text_is_cut_makes_no_difference(pieces: list[str], is_opened: bool) -> None:
    prompt = "<think>" * is_opened
    answer = "".join(pieces)
    assert split(prompt, pieces) == split(prompt, [answer]) == split(prompt, list(answer))


def test_a_thought_is_passed_on_while_it_comes() -> None:
    reader = reasoning()
    assert reader.feed("<think>First,") == [Thought("First,")]
    assert reader.feed(" I </") == [Thought(" I")]
    assert reader.feed("think> Yes") == [Text("Yes")]
    assert reader.feed(", ") == [Text(", ")]
