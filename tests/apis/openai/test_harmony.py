"""Answers in the form of gpt-oss, for a text in any pieces."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, strategies as st

from lmi.apis.openai.parts.answer_parts import AnswerParts
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.parts.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, harmony
from lmi.types import AnswerEnd

THOUGHT = f"{CHANNEL}analysis{MESSAGE}I <see>.<|end|>"
CALLED = [ToolCall("f"), Arguments('{"a": 1}')]

ANSWERS: dict[str, tuple[str, list[AnswerPart]]] = {
    "a thought and text": (
        f"{THOUGHT}{START}assistant{CHANNEL}final{MESSAGE}Yes.<|return|>",
        [Thought("I <see>."), Text("Yes.")],
    ),
    "a call": (
        (
            f"{THOUGHT}{START}assistant{CHANNEL}commentary to=functions.f "
            f'{CONSTRAIN}json{MESSAGE}{{"a": 1}}<|call|>'
        ),
        [Thought("I <see>."), *CALLED],
    ),
    "a function beside the role": (
        f'{START}assistant to=functions.f{CHANNEL}commentary json{MESSAGE}{{"a": 1}}<|call|>',
        [*CALLED],
    ),
    "text before a call": (
        f"{CHANNEL}commentary{MESSAGE}I look.<|end|>{START}assistant"
        f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"a": 1}}',
        [Text("I look."), *CALLED],
    ),
    "text behind a call": (
        (
            f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"a": '
            f"1}}<|call|>{START}assistant{CHANNEL}final{MESSAGE}So."
        ),
        [*CALLED, Text("So.")],
    ),
    "cut in a thought": (f"{CHANNEL}analysis{MESSAGE}I s", [Thought("I s")]),
    "cut in a mark": (f"{CHANNEL}final{MESSAGE}a <|e", [Text("a <|e")]),
    "cut in a header": (f"{CHANNEL}fin", []),
    "text alone": ("a <b> c", [Text("a <b> c")]),
    "nothing": ("", []),
}


def read(pieces: list[str], *, has_tools: bool = True) -> list[AnswerPart]:
    reader = AnswerParts(partial(harmony, has_tools=has_tools), {})
    whole: list[AnswerPart] = []
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.feed(
        "", AnswerEnd.EOS_TOKEN
    ):
        last = whole[-1] if whole else None
        if (
            isinstance(part, ToolCall)
            or last is None
            or isinstance(last, ToolCall)
            or type(part) is not type(last)
        ):
            whole.append(part)
        else:
            whole[-1] = type(last)(last.text + part.text)

    return whole


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_same_parts_whole_and_by_single_characters(name: str) -> None:
    answer, parts = ANSWERS[name]
    assert read([answer]) == read(list(answer)) == parts


@given(
    st.lists(
        st.sampled_from(
            [START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS, "analysis", "to=functions.f", "<|", "a"]
        )
    )
)
def test_where_the_text_is_cut_makes_no_difference(pieces: list[str]) -> None:
    assert read(pieces) == read(["".join(pieces)]) == read(list("".join(pieces)))


def test_without_tools_a_call_stays_text() -> None:
    assert read([ANSWERS["a call"][0]], has_tools=False) == [Thought("I <see>."), Text('{"a": 1}')]
