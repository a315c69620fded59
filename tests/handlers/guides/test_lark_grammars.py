"""Grammars in Lark are told from those in EBNF, mean what Lark says, and are refused with their
place.
"""

import pytest

from handlers.guides.lark_grammars import is_lark
from lmi.executor import GuideType
from tests.handlers.guides.walks import accepts, matcher

SUMS = """
?start: sum
?sum: product ((PLUS | "-") product)*   // left to right
?product: atom (("*" | "/") atom)*
?atom: NUMBER -> number | "(" sum ")"
PLUS: "+"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
ANSWER = 'start: "yes" | "no"'


@pytest.mark.parametrize(
    "grammar",
    [ANSWER, SUMS, "%import common.INT\nstart: INT", "!start: a\na: /::=/", "start :a\na:"],
)
def test_a_grammar_whose_first_rule_has_a_colon_is_lark(grammar: str) -> None:
    assert is_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a:"',
        '# start: x\nroot ::= "a"',
        'root\n  ::= a\na ::= "b"',
        '"a: b"',
        "",
        'some-rule ::= ":"',
    ],
)
def test_every_other_grammar_is_ebnf(grammar: str) -> None:
    assert not is_lark(grammar)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (ANSWER, ["yes", "no"], ["maybe", "y", ""]),
        (SUMS, ["1+2*(3 - 4)", "12"], ["1+", "()", "a"]),
        ('start: a+\na: "x"i ["y"]', ["xXy", "x"], ["y", ""]),
        ('start: WORD ("," WORD)~1..2\nWORD: /[a-z]+/', ["ab,c", "a,b,c"], ["a", "a,b,c,d"]),
        ('start: "a".."c" DIGIT\n%import common.DIGIT', ["b7"], ["d7", "b"]),
    ],
)
def test_a_grammar_in_lark_is_followed(grammar: str, right: list[str], wrong: list[str]) -> None:
    follower = matcher(GuideType.EBNF_GRAMMAR, grammar)
    assert [text for text in right if not accepts(follower, text)] == []
    assert [text for text in wrong if accepts(follower, text)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: "yes" | nop', 'line 1, column 8: unknown name: "nop"'),
        ('start: a\na.2: "x"', "line 2, column 6: priority not supported yet"),
        ('start: a\n  | @@ "x"', "line 2, column 6: lexer error"),
        ("start: A\nA: /a(?=b)/", "line 2, column 4: its regular expression: look-around"),
        ('rule: "a"', "no start rule found"),
        (
            'start: a\na: %json {"type": "object"}',
            "line 2, column 4: %json is not followed here, only %import and",
        ),
        (
            '%llguidance {"no_forcing": true}\nstart: "a"',
            "line 1, column 1: %llguidance is not followed here",
        ),
        (
            "start: a\na: <|im_end|>",
            "line 2, column 4: <|im_end|>: special tokens are no part of a structure",
        ),
        (
            'start: a\na[temperature=0.5]: "x"',
            "line 2, column 1: attributes of a rule are not followed here",
        ),
        ('start: start "a"', "no text of this vocabulary fits it"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        matcher(GuideType.EBNF_GRAMMAR, grammar)

    assert str(caught.value).startswith(said)


def test_what_texts_expressions_and_comments_hold_is_no_part_of_the_grammar() -> None:
    grammar = 'start: "%json" "<b>" /<[5]>/  // %json <a>\n# <a>\n'
    assert accepts(matcher(GuideType.EBNF_GRAMMAR, grammar), "%json<b><5>")
