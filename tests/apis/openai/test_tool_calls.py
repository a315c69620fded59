"""Tool calls in an answer's text, for any pieces of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.apis.openai.parts.answer_parts import AnswerParts
from lmi.apis.openai.parts.buffer import AnswerPart, Arguments, Read, Text, ToolCall
from lmi.apis.openai.parts.forced_calls import forced_call, forced_calls
from lmi.apis.openai.parts.forms import PARSERS
from lmi.settings.annexes import TOOL_CALL_FORMS
from lmi.types import AnswerEnd

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'
ARGUMENTS = '{"a": [1, {"b": "}"}]}'
F = [ToolCall("f"), Arguments(ARGUMENTS)]

TYPES = {
    "a": {"type": "integer"},
    "b": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "s": {"type": "string"},
}
TOOLS = {"f": {"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}}}
TYPED = [ToolCall("f"), Arguments('{"a": 1, "b": {"c": [2]}, "s": "1\\n2", "x": "3"}')]
G = [ToolCall("g"), Arguments("{}")]

ANSWERS: dict[str, tuple[str, str, list[AnswerPart]]] = {
    "text alone": ("hermes", "Hello <b> {}", [Text("Hello <b> {}")]),
    "one call": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [*F]),
    "text before": ("hermes", f"I look. \n<tool_call>{CALL}</tool_call>\n", [Text("I look."), *F]),
    "text behind": ("hermes", f"<tool_call>{CALL}</tool_call> done ", [*F, Text("done ")]),
    "two calls": (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
        [*F, *F],
    ),
    "two calls without an end": ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", [*F, *F]),
    "arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"x": 1} , "name": "g"}</tool_call>',
        None,
    ),
    "escapes": (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"a": "\"}\\"}}</tool_call>',
        None,
    ),
    "a name of escapes": (
        "hermes",
        r'<tool_call>{"name": "\u0066", "arguments": {}}',
        [ToolCall("f"), Arguments("{}")],
    ),
    "cut in the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a',
        [ToolCall("f"), Arguments('{"a')],
    ),
    "cut in the name": (
        "hermes",
        'x <tool_call>{"name": "f',
        [Text("x"), Text(' <tool_call>{"name": "f')],
    ),
    "cut in the mark": ("hermes", "x <tool_c", [Text("x"), Text(" <tool_c")]),
    "no call behind a word": (
        "hermes",
        "said <tool_call>{}",
        [Text("said"), Text(" <tool_call>{}")],
    ),
    "no object": ("hermes", "<tool_call>f(1)</tool_call>", [Text("<tool_call>f(1)</tool_call>")]),
    "no arguments": ("hermes", '<tool_call>{"name": "f"} x', [Text('<tool_call>{"name": "f"} x')]),
    "arguments that are no object": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "x"} y',
        [Text('<tool_call>{"name": "f", "arguments": "x"} y')],
    ),
    "arguments that are a list": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": ["{"]} y',
        [Text('<tool_call>{"name": "f", "arguments": ["{"]} y')],
    ),
    "a list where one call is due": (
        "hermes",
        '<tool_call>["name"] x',
        [Text('<tool_call>["name"] x')],
    ),
    "a key that is no JSON": (
        "hermes",
        r'<tool_call>{"\x": 1} y',
        [Text(r'<tool_call>{"\x": 1} y')],
    ),
    "a list of other objects": (
        "jamba",
        '<tool_calls>[{"a": 1}] x',
        [Text('<tool_calls>[{"a": 1}] x')],
    ),
    "another object behind a call": (
        "jamba",
        f'<tool_calls>[{CALL}, {{"a": 1}}] x',
        [*F, Text('{"a": 1}] x')],
    ),
    "pythonic: an argument without a name": ("pythonic", "[f(1)]", [Text("[f(1)]")]),
    "json: one call": ("json", CALL, [*F]),
    "json: parameters": (
        "json",
        ' {"name":"f","parameters":{}} \n',
        [ToolCall("f"), Arguments("{}")],
    ),
    "json: a list": ("json", f"[{CALL}, {CALL}]\n", [*F, *F]),
    "json: with semicolons": ("json", f"{CALL}; {CALL}", [*F, *F]),
    "json: python tag": ("json", f"<|python_tag|>{CALL}", [*F]),
    "json: text": ("json", f"See: {CALL}", [Text(f"See: {CALL}")]),
    "json: another object": ("json", '{"a": {"name": 1}} and', [Text('{"a": {"name": 1}} and')]),
    "json: a list of numbers": ("json", " [1, 2]", [Text(" [1, 2]")]),
    "json: text behind": ("json", f"{CALL} so", [*F, Text(" so")]),
    "json: cut": ("json", '[{"name": "f", ', [Text('[{"name": "f", ')]),
    "json: nothing": ("json", "", []),
    "deepseek_v3": (
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Text("I look."), *F, *G],
    ),
    "deepseek_v3: no name": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{} so",
        [Text("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{} so")],
    ),
    "deepseek_v3: no call": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜> so",
        [Text("<｜tool▁calls▁begin｜> so")],
    ),
    "deepseek_v31": (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*F, *G],
    ),
    "kimi_k2": (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [*F, *G],
    ),
    "mistral: a list": (
        "mistral",
        f'[TOOL_CALLS] [{CALL}, {{"name": "g", "arguments": {{}}}}]',
        [*F, *G],
    ),
    "mistral: by name": (
        "mistral",
        f"So: [TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g{{}}",
        [Text("So:"), *F, *G],
    ),
    "mistral: with an id": ("mistral", f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{ARGUMENTS}", [*F]),
    "mistral: text": ("mistral", "a [1] {} [TOOL] b", [Text("a [1] {} [TOOL] b")]),
    "mistral: a list of numbers": (
        "mistral",
        "[TOOL_CALLS][1, 2] b",
        [Text("[TOOL_CALLS][1, 2] b")],
    ),
    "mistral: one broken call of two": ("mistral", f"[TOOL_CALLS][{CALL}, {{x", [*F, Text("{x")]),
    "granite": ("granite", f"Well <|tool_call|>[{CALL}]", [Text("Well"), *F]),
    "granite in text": ("granite", f"<tool_call>[{CALL},{CALL}] ok", [*F, *F, Text("ok")]),
    "granite-20b-fc": ("granite-20b-fc", f"<function_call> {CALL} <function_call>{CALL}", [*F, *F]),
    "phi4_mini_json": ("phi4_mini_json", f"functools[{CALL}]", [*F]),
    "phi4_mini_json: the word": (
        "phi4_mini_json",
        "use functools here",
        [Text("use functools here")],
    ),
    "jamba": ("jamba", f"<tool_calls>[\n{CALL},\n{CALL}\n]</tool_calls>", [*F, *F]),
    "pythonic": ("pythonic", """ [f(a=[1, {'b': "}"}]), g()] """, [*F, *G]),
    "pythonic: marks of Llama 4": (
        "pythonic",
        "<|python_start|>[x.g(a=True, b=None)]<|python_end|>",
        None,
    ),
    "pythonic: brackets in text": ("pythonic", "See [f(a=1)]", [Text("See [f(a=1)]")]),
    "pythonic: a link": ("pythonic", "[f](http://f) [g()]", [Text("[f](http://f) [g()]")]),
    "pythonic: no literal": ("pythonic", "[f(a=b)]", [Text("[f(a=b)]")]),
    "pythonic: arguments in one": ("pythonic", "[f(**{'a': 1})]", [Text("[f(**{'a': 1})]")]),
    "pythonic: endless": ("pythonic", "[" * 90, [Text("[" * 90)]),
    "lfm2": ("lfm2", "Yes. <|tool_call_start|>[g()]<|tool_call_end|>", [Text("Yes."), *G]),
    "qwen3_xml": (
        "qwen3_xml",
        'Sure.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{"c": '
        "[2]}\n</parameter>\n"
        "<parameter=s>\n1\n2\n</parameter>\n<parameter=x>3</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=g></function></tool_call>",
        [Text("Sure."), *TYPED, *G],
    ),
    "qwen3_xml: JSON": ("qwen3_xml", f"<tool_call>{CALL}", [Text(f"<tool_call>{CALL}")]),
    "qwen3_xml: types": (
        "qwen3_xml",
        "<tool_call><function=f><parameter=a>one</parameter><parameter=b>None</parameter></function></tool_call>",
        [ToolCall("f"), Arguments('{"a": "one", "b": null}')],
    ),
    "qwen3_xml: without an end": (
        "qwen3_xml",
        "<tool_call><function=f><parameter=a>1</parameter> and",
        [ToolCall("f"), Arguments('{"a": 1}'), Text("and")],
    ),
    "qwen3_xml: ends behind an argument": (
        "qwen3_xml",
        "<tool_call><function=f><parameter=a>1</parameter>\n",
        [ToolCall("f"), Arguments('{"a": 1}')],
    ),
    "qwen3_xml: cut": (
        "qwen3_xml",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>{",
        [ToolCall("f"), Arguments('{"a": 1')],
    ),
    "seed_oss": ("seed_oss", "<seed:tool_call><function=g>\n</function></seed:tool_call>", [*G]),
    "glm45": (
        "glm45",
        "Ok<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>"
        '<arg_value>{"c": [2]}</arg_value><arg_key>s</arg_key><arg_value>1\n2</arg_value>'
        "<arg_key>x</arg_key><arg_value>3</arg_value></tool_call><tool_call>g</tool_call>",
        [Text("Ok"), *TYPED, *G],
    ),
    "minimax_m2": (
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter '
            'name="a">1</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        [ToolCall("f"), Arguments('{"a": 1}')],
    ),
    "minimax_m2: two calls in a block": (
        "minimax_m2",
        'So: <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call> ok',
        [Text("So:"), ToolCall("f"), Arguments('{"a": 1}'), *G, Text("ok")],
    ),
    "minimax_m2: no block": (
        "minimax_m2",
        '<invoke name="g"></invoke>\n</minimax:tool_call>',
        [*G],
    ),
    "minimax_m2: an empty block": (
        "minimax_m2",
        "<minimax:tool_call> so",
        [Text("<minimax:tool_call> so")],
    ),
    "qwen3_xml: no opening mark": (
        "qwen3_xml",
        "I look.\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        [Text("I look."), ToolCall("f"), Arguments('{"a": 1}')],
    ),
    "qwen3_xml: two calls in a block": (
        "qwen3_xml",
        "<tool_call>\n<function=g>\n</function>\n<function=g>\n</function>\n</tool_call>",
        [*G, *G],
    ),
    "qwen3_xml: two calls without marks": (
        "qwen3_xml",
        "<function=g></function><function=g></function>",
        [*G, *G],
    ),
    "seed_oss: no opening mark": ("seed_oss", "<function=g>\n</function></seed:tool_call>", [*G]),
    "deepseek_v31: no opening mark": (
        "deepseek_v31",
        "So<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Text("So"), *G],
    ),
    "kimi_k2: the other opening mark": (
        "kimi_k2",
        "<|tool_call_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_section_end|>",
        [*G],
    ),
    "kimi_k2: no opening mark": (
        "kimi_k2",
        "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [*G],
    ),
    "phi4_mini_json: its marks": ("phi4_mini_json", f"<|tool_call|>[{CALL}]<|/tool_call|>", [*F]),
    "hermes: no opening mark": ("hermes", f"{CALL}\n</tool_call>\n{CALL}\n</tool_call>", [*F, *F]),
    "hermes: a fence": ("hermes", f"```json\n{CALL}\n```\nDone", [*F, Text("Done")]),
    "hermes: no marks, and text": ("hermes", f" {CALL} so", [*F, Text("so")]),
    "hermes: the JSON of no tool": (
        "hermes",
        '{"name": "Bob", "arguments": {}}',
        [Text('{"name": "Bob", "arguments": {}}')],
    ),
    "hermes: a fence of code": (
        "hermes",
        '```json\n{"a": 1}\n```',
        [Text('```json\n{"a": 1}\n```')],
    ),
    "generic": ("generic", f"<tool_call>{CALL}</tool_call>", [*F]),
    "mistral: no mark": ("mistral", f"[{CALL}]", [*F]),
    "granite: no mark": ("granite", f"[{CALL}, {CALL}]", [*F, *F]),
    "a call whose arguments are no JSON": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {city: Tokyo}}</tool_call>',
        [ToolCall("f"), Arguments("{city: Tokyo}")],
    ),
}
ANSWERS["arguments first"] = (
    *ANSWERS["arguments first"][:2],
    [ToolCall("g"), Arguments('{"x": 1}')],
)
ANSWERS["pythonic: marks of Llama 4"] = (
    *ANSWERS["pythonic: marks of Llama 4"][:2],
    [ToolCall("x.g"), Arguments('{"a": true, "b": null}')],
)
ANSWERS["escapes"] = (*ANSWERS["escapes"][:2], [ToolCall("f"), Arguments(r'{"a": "\"}\\"}')])


def joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """Join neighbours of one kind; each call has its own beginning."""
    whole: list[AnswerPart] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, ToolCall) or type(part) is not type(last):
            whole.append(part)
        else:
            whole[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr, call-arg]

    return whole


def read(
    parser: Read,
    pieces: list[str],
    tools: dict[str, Any] = TOOLS,
    end: AnswerEnd = AnswerEnd.EOS_TOKEN,
) -> list[AnswerPart]:
    """The parts of an answer that comes in these pieces. Each text is found where it says."""
    reader = AnswerParts(parser, tools)
    parts: list[AnswerPart] = []
    come = ""
    for piece, end_of_piece in [*((piece, None) for piece in pieces), ("", end)]:
        come += piece
        for part in reader.read(piece, end_of_piece):
            parts.append(part)
            if isinstance(part, Text):
                assert come[: len(come) - reader.num_unread].endswith(part.text)

    return joined(parts)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_same_parts_whole_and_by_single_characters(name: str) -> None:
    parser, answer, parts = ANSWERS[name]
    assert read(PARSERS[parser], [answer]) == joined(parts)
    assert read(PARSERS[parser], list(answer)) == joined(parts)


def test_each_form_of_the_option_has_a_parser_and_an_example() -> None:
    # Of the latter is tests/apis/openai/test_harmony.py
    special_forms = {"text", "none", "openai"}
    assert (
        set(PARSERS)
        == set(TOOL_CALL_FORMS) - special_forms
        == {parser for parser, _, _ in ANSWERS.values()}
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": [1]},
        {"properties": {"a": 1}},
        {"properties": {"a": {"type": [{}], "anyOf": 3}}},
    ],
)
def test_an_argument_without_a_type_is_a_text(parameters: dict[str, Any]) -> None:
    tools = {"f": {"function": {"name": "f", "parameters": parameters}}}
    answer = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert read(PARSERS["qwen3_xml"], [answer], tools) == [ToolCall("f"), Arguments('{"a": "1"}')]


COLOURS = {"enum": [1, 2, None]}
PLACE = {"title": "Place", "type": "object", "properties": {"city": {"type": "string"}}}
DEFINITIONS = {
    "Place": PLACE,
    "a/b": {"type": "integer"},
    "again": {"anyOf": [{"$ref": "#/$defs/again"}, {"type": "boolean"}]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Place"}, '{"city": "Rome"}', '{"city": "Rome"}'),
        ({"allOf": [{"$ref": "#/$defs/Place"}]}, '{"city": "Rome"}', '{"city": "Rome"}'),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "None", "null"),
        ({"$ref": "#/$defs/a~1b"}, "7", "7"),
        ({"$ref": "#/$defs/again"}, "True", "true"),
        ({"$ref": "#/$defs/nothing"}, "7", '"7"'),
        ({"$ref": "https://example.com/a"}, "7", '"7"'),
        (COLOURS, "2", "2"),
        (COLOURS, "null", "null"),
        (COLOURS, "true", '"true"'),
        ({"const": [1]}, "[1]", "[1]"),
        ({"type": "string", "enum": ["1", 1]}, "1", '"1"'),
        ({"enum": ["1", "auto"]}, "1", '"1"'),
        ({"enum": ["1", "auto"]}, '"auto"', r'"\"auto\""'),
        ({"type": "integer"}, "20000000000000000000", "20000000000000000000"),
        ({"type": "integer"}, "-20000000000000000000", "-20000000000000000000"),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "number"}, "5.5", "5.5"),
    ],
)
def test_an_argument_has_a_type_that_its_schema_names_in_any_form(
    schema: dict[str, Any], text: str, value: str
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": DEFINITIONS}
    tools = {"f": {"function": {"name": "f", "parameters": parameters}}}
    call = f"<function=f><parameter=a>{text}</parameter></function>"
    assert read(PARSERS["qwen3_xml"], [f"<tool_call>{call}</tool_call>"], tools) == [
        ToolCall("f"),
        Arguments(f'{{"a": {value}}}'),
    ]


PIECES = [
    CALL,
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    "[",
    "]",
    '"',
    '"name"',
    ":",
    '"f"',
    ",",
    ";",
    "\\",
    " ",
    "x",
]
MARKS = """
[TOOL_CALLS] [ARGS] <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> f<｜tool▁sep｜> function<｜tool▁sep｜>f ```
json <｜tool▁call▁end｜> <|tool_calls_section_begin|> <|tool_call_begin|>
f:0<|tool_call_argument_begin|> <|tool_call|> functools <function_call> <tool_calls>
<|python_start|> f(a=1) g() ' <function=f> <parameter=a> </parameter> </function> <arg_key>
</arg_key> <arg_value> </arg_value> <|tool_call_start|> <minimax:tool_call> <seed:tool_call> ＜
""".split()  # noqa: E501


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
def test_where_the_text_is_cut_makes_no_difference(parser: str, data: Any) -> None:
    pieces = data.draw(st.lists(st.sampled_from([*PIECES, *MARKS, '"arguments"', "{}", "\n"])))
    answer = "".join(pieces)
    whole = read(PARSERS[parser], [answer])

    assert read(PARSERS[parser], pieces) == whole == read(PARSERS[parser], list(answer))


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = AnswerParts(PARSERS["hermes"], TOOLS)
    assert parser.feed('<tool_call>{"name": "f", "argu') == []
    assert parser.feed('ments": {"city": "Par') == [ToolCall("f"), Arguments('{"city": "Par')]
    assert parser.feed('is"}') == [Arguments('is"}')]
    assert parser.feed("}</tool_call>") == []


def test_the_arguments_of_a_named_function_are_the_whole_answer() -> None:
    parser = partial(forced_call, name="f")
    assert read(parser, [""]) == []
    assert read(parser, ['{"a"', ": 1}"]) == [ToolCall("f"), Arguments('{"a": 1}')]


CUT: dict[str, tuple[str, str, list[AnswerPart]]] = {
    "in the name": ("hermes", 'Well <tool_call>{"name": "f', [Text("Well")]),
    "behind the mark": ("hermes", "<tool_call>\n", []),
    "in the name of a second call": (
        "hermes",
        f'<tool_call>{CALL}</tool_call><tool_call>{{"na',
        [*F],
    ),
    "in the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a',
        [ToolCall("f"), Arguments('{"a')],
    ),
    "long after what is no call": (
        "hermes",
        "The tag <tool_call>{} is",
        [Text("The tag <tool_call>{} is")],
    ),
    "without marks": ("hermes", '{"name": "f", "arg', []),
    "in JSON that is no call": ("hermes", '{"name": "Bob", "a', [Text('{"name": "Bob", "a')]),
    "json: in a call": ("json", '{"name": "f", "arg', []),
    "json: in a second call": ("json", f'[{CALL}, {{"name', [*F]),
    "json: between calls": ("json", f"[{CALL},", [*F]),
    "json: in something else": ("json", '{"name": "Bob", "a', [Text('{"name": "Bob", "a')]),
    "qwen3_xml: in the name": ("qwen3_xml", "<tool_call><function=f", []),
    "minimax_m2: behind the mark": ("minimax_m2", "So <minimax:tool_call>\n<inv", [Text("So")]),
    "deepseek_v31: in the name": (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        [],
    ),
    "kimi_k2: in the name": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f",
        [],
    ),
    "mistral: in the name": ("mistral", "[TOOL_CALLS]get_wea", []),
    "lfm2: in the list": ("lfm2", "<|tool_call_start|>[f(a=1", []),
    "glm45: in the name": ("glm45", "Ok <tool_call>f", [Text("Ok")]),
}


@pytest.mark.parametrize("end", [AnswerEnd.LENGTH, AnswerEnd.STOP_SEQUENCE])
@pytest.mark.parametrize("place", CUT)
def test_the_markup_of_a_cut_call_is_no_text(place: str, end: AnswerEnd) -> None:
    parser, answer, parts = CUT[place]
    assert read(PARSERS[parser], [answer], end=end) == joined(parts)
    assert read(PARSERS[parser], list(answer), end=end) == joined(parts)


def test_a_list_of_forced_calls_has_no_text_wherever_it_is_cut() -> None:
    answer = f"[{CALL},{CALL.replace('f', 'g', 1)}]"
    for length in range(1, len(answer) + 1):
        parts = read(forced_calls, list(answer[:length]), end=AnswerEnd.LENGTH)
        assert not any(isinstance(part, Text) for part in parts)
        assert parts == read(forced_calls, [answer[:length]], end=AnswerEnd.LENGTH)

    assert read(forced_calls, [answer]) == [*F, ToolCall("g"), Arguments(ARGUMENTS)]


@pytest.mark.parametrize("answer", ["No calls", "", "[1, 2]", '{"a": 1} so', "[so"])
def test_what_an_engine_without_guides_answers_to_a_forced_call_is_text(answer: str) -> None:
    expected = [Text(answer)] if answer else []
    assert read(forced_calls, [answer]) == expected == read(forced_calls, list(answer))
