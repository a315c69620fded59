"""Tool calls in an answer's text, for any pieces of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi.apis.openai.tool_calls import PARSERS, Arguments, Named, Part, Text, ToolCall, ToolCalls

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'
ARGUMENTS = '{"a": [1, {"b": "}"}]}'
F = [ToolCall("f"), Arguments(ARGUMENTS)]

ANSWERS: dict[str, tuple[str, str, list[Part]]] = {
    "text alone": ("hermes", "Hello <b> {}", [Text("Hello <b> {}")]),
    "one call": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [*F]),
    "text before": ("hermes", f"I look. \n<tool_call>{CALL}</tool_call>\n", [Text("I look."), *F]),
    "text behind": ("hermes", f"<tool_call>{CALL}</tool_call> done ", [*F, Text("done ")]),
    "two calls": ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [*F, *F]),
    "two calls without an end": ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", [*F, *F]),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"x": 1} , "name": "g"}</tool_call>', None),
    "escapes": ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\"}\\"}}</tool_call>', None),
    "a name of escapes": (
        "hermes",
        r'<tool_call>{"name": "\u0066", "arguments": {}}',
        [ToolCall("f"), Arguments("{}")],
    ),
    "cut in the arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a', [ToolCall("f"), Arguments('{"a')]),
    "cut in the name": ("hermes", 'x <tool_call>{"name": "f', [Text("x"), Text(' <tool_call>{"name": "f')]),
    "cut in the mark": ("hermes", "x <tool_c", [Text("x"), Text(" <tool_c")]),
    "no call behind a word": ("hermes", "said <tool_call>{}", [Text("said"), Text(" <tool_call>{}")]),
    "no object": ("hermes", "<tool_call>f(1)</tool_call>", [Text("<tool_call>f(1)</tool_call>")]),
    "no arguments": ("hermes", '<tool_call>{"name": "f"} x', [Text('<tool_call>{"name": "f"} x')]),
    "arguments that are no object": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "x"} y',
        [Text('<tool_call>{"name": "f", "arguments": "x"} y')],
    ),
    "json: one call": ("json", CALL, [*F]),
    "json: parameters": ("json", ' {"name":"f","parameters":{}} \n', [ToolCall("f"), Arguments("{}")]),
    "json: a list": ("json", f"[{CALL}, {CALL}]\n", [*F, *F]),
    "json: with semicolons": ("json", f"{CALL}; {CALL}", [*F, *F]),
    "json: python tag": ("json", f"<|python_tag|>{CALL}", [*F]),
    "json: text": ("json", f"See: {CALL}", [Text(f"See: {CALL}")]),
    "json: another object": ("json", '{"a": {"name": 1}} and', [Text('{"a": {"name": 1}} and')]),
    "json: a list of numbers": ("json", " [1, 2]", [Text(" [1, 2]")]),
    "json: text behind": ("json", f"{CALL} so", [*F, Text(" so")]),
    "json: cut": ("json", '[{"name": "f", ', [Text('[{"name": "f", ')]),
    "json: nothing": ("json", "", []),
}
ANSWERS["arguments first"] = (*ANSWERS["arguments first"][:2], [ToolCall("g"), Arguments('{"x": 1}')])
ANSWERS["escapes"] = (*ANSWERS["escapes"][:2], [ToolCall("f"), Arguments(r'{"a": "\"}\\"}')])


def joined(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind; each call has its own beginning."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, ToolCall) or type(part) is not type(last):
            whole.append(part)
        else:
            whole[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr, call-arg]
    return whole


def read(parser: ToolCalls, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.flush())


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_same_parts_whole_and_by_single_characters(name: str) -> None:
    parser, answer, parts = ANSWERS[name]
    assert read(PARSERS[parser](), [answer]) == joined(parts)
    assert read(PARSERS[parser](), list(answer)) == joined(parts)


PIECES = [CALL, "<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', '"name"', ":", '"f"', ",", ";", "\\", " ", "x"]


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
def test_where_the_text_is_cut_makes_no_difference(parser: str, data: Any) -> None:
    pieces = data.draw(st.lists(st.sampled_from([*PIECES, '"arguments"', "{}"])))
    answer = "".join(pieces)
    whole = read(PARSERS[parser](), [answer])
    assert read(PARSERS[parser](), pieces) == whole == read(PARSERS[parser](), list(answer))


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed('<tool_call>{"name": "f", "argu') == []
    assert parser.feed('ments": {"city": "Par') == [ToolCall("f"), Arguments('{"city": "Par')]
    assert parser.feed('is"}') == [Arguments('is"}')]
    assert parser.feed("}</tool_call>") == []


def test_the_arguments_of_a_named_function_are_the_whole_answer() -> None:
    parser = Named("f")
    assert parser.feed("") == []
    assert read(parser, ['{"a"', ": 1}"]) == [ToolCall("f"), Arguments('{"a": 1}')]
