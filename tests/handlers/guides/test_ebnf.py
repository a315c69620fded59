"""Grammars in EBNF mean what they say, whatever llguidance makes one lexeme.

Why there are lexemes: in a text of 1,300 characters inside of JSON a mask takes 0.03 ms so (the
median, at a vocabulary of 48,000), and 1.4 ms by characters. Words take 35 times as long by
characters, lists and tables 5 to 7 times, SQL 2.3 times; sums, games and programs as long.

llguidance's own `gbnf_to_lark` (of 1.9.1) makes every regular rule a lexeme, whatever may follow
it. Of the grammars here it reads 7 of the 9 long ones as they are meant, and 3 of the 13 short
ones.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest
from llguidance import LLMatcher

from handlers.guides.ebnf import read_grammar
from handlers.guides.grammar import Chars, Either, Joined, Node, Ref, Repeat
from handlers.guides.lark import lark_of_ebnf
from handlers.guides.matcher import new_matcher
from handlers.guides.tokenizer import new_tokenizer
from lmi.executor import GuidedDecodingConfig, GuideType
from tests.handlers.guides.walks import accepts, matcher, tokenizer

LETTERS = "ab\u00e9\u00e8"
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root ::= (sum "=" ws term "\n")+
sum ::= term ([-+*/] term)*
term ::= name | number | "(" ws sum ")" ws
name ::= [a-z] [a-z0-9_]* ws
number ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
SQL = r"""
root ::= "SELECT " columns " FROM " name (" WHERE " condition)? (" LIMIT " [0-9]+)? ";"
columns ::= "*" | name (", " name)*
condition ::= comparison ((" AND " | " OR ") comparison)*
comparison ::= name " " ("=" | "<" | "<=" | "LIKE") " " value | "(" condition ")"
value ::= [0-9]+ ("." [0-9]+)? | "'" [^']* "'"
name ::= [a-zA-Z_] [a-zA-Z0-9_]*
"""
GAME = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= ([NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8] | ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])? | "O-O" "-O"?) [+#]?
"""  # noqa: E501
PROGRAM = r"""
root ::= function*
function ::= type name "(" (type name)? ")" "{" statement* "}"
type ::= ("int" | "float") ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::= type name ws "=" ws sum ";" | name ws "=" ws sum ";" | "return" ws sum ";" | "//" [^\n]* "\n"
sum ::= term (("+" | "-") term)*
term ::= name | [0-9]+ | "(" ws sum ws ")" | name "(" (sum ("," ws sum)*)? ")"
ws ::= [ \t\n]+
"""  # noqa: E501
LIST = r'root ::= ("- " [^\r\n\x0b\u0085\u2028]+ "\n")+'
WORDS = "root ::= word ([ \\t\\n] word)*  # of any letters\nword ::= [a-zA-Z0-9.,!?'\"-]+"
KANA = (
    "root ::= kana+ ([ \\n] kana+)*\nkana ::= [\u3041-\u309f] | [\u30a1-\u30ff] | [\u4e00-\u9faf]"
)
TABLE = (
    'root ::= row ("\\n" row)*\nrow ::= cell ("," cell)*\ncell ::= [^",\\n]* | "\\"" ([^"] | '
    '"\\"\\"")* "\\""'
)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON, ['{"a": [1, -2.5e+3, "\\u00e9\\\\", true]}', "{}"], ["[]", '{"a":}']),
        (SUMS, ["a+(b*12)=3\n"], ["a+=3\n"]),
        (SQL, ["SELECT a, b FROM t WHERE (a = 1 OR b LIKE 'x') LIMIT 3;"], ["SELECT ;"]),
        (GAME, ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O exd5\n1. a8=Q+ b3\n"], ["1. e4\n"]),
        (PROGRAM, ["int f(float x){returned = inta+1;return x;// int\n}"], ["int f(){x}"]),
        (LIST, ["- one\n- two\n"], ["- one"]),
        (WORDS, ["Is this it? Yes!"], ["two  spaces"]),
        (KANA, ["\u3053\u3093 \u65e5\u672c"], ["a"]),
        (TABLE, ['a,"b,""c"\n,,', ""], ['"a']),
    ],
)  # fmt: skip
def test_a_grammar_compiles_and_is_quick_to_follow(
    grammar: str, right: list[str], wrong: list[str]
) -> None:
    follower = matcher(GuideType.EBNF_GRAMMAR, grammar)
    assert [text for text in right if not accepts(follower, text)] == []
    assert [text for text in wrong if accepts(follower, text)] == []

    times_s = []
    for token_id in tokenizer().tokenize_str(right[0]):
        started_s = time.thread_time()
        follower.compute_bitmask()
        times_s.append(time.thread_time() - started_s)

        assert follower.consume_token(token_id)

    assert sorted(times_s)[len(times_s) // 2] < 0.002


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= [a-z]+ "b"', "aab"),
        ('root ::= x "b"\nx ::= [a-z]+', "aab"),
        ('root ::= name ":" name\nname ::= [a-z:]+', "a:b"),
        ("root ::= x x\nx ::= [0-9]{1,2}", "12"),
        ('root ::= x{4}\nx ::= "ab" | [a-b]', "bbab"),
        ('root ::= ("a"*)+ "b"', "aab"),
        ('root ::= (x{1,3}){1,9} "x"{0,0}\nx ::= "a"', "aaaaaaa"),
        ('root ::= x{2,-1}\nx ::= "a"', "aaaa"),
        ('root ::= "\u00e9"+ "\u00e8"', "\u00e9\u00e9\u00e8"),
        (r'root ::= "\u00A9\0\-\/" [\-\]^]', "\u00a9\0-/^"),
        ('root ::= "if" | name\nname ::= [a-z]+', "iff"),
        ('root ::= . "b" .', "\nb\u00e9"),
        ('start ::= "no"\nroot ::= start # that is all', "no"),
    ],
)
def test_a_lexeme_is_no_longer_than_the_grammar_needs(grammar: str, text: str) -> None:
    assert accepts(matcher(GuideType.EBNF_GRAMMAR, grammar), text)


def random_part(choice: random.Random, level: int, names: list[str]) -> str:
    kind = choice.random()
    if level == 0 or kind < 0.25:
        return choice.choice(
            ['"a"', '"b"', '"ab"', "[ab]", "[^a]", '"\u00e9"', "[\u00e9\u00e8]", '""', '"aa"']
        )

    if kind < 0.4:
        return choice.choice(names)

    part = random_part(choice, level - 1, names)
    further_part = random_part(choice, level - 1, names)
    if kind < 0.6:
        return f"({part}){choice.choice(['*', '+', '?', '{1,2}', '{2}', '{0,3}'])}"

    return f"{part} {further_part}" if kind < 0.8 else f"({part} | {further_part})"


def random_grammar(choice: random.Random) -> str:
    names = [f"x{number}" for number in range(choice.randint(1, 4))]
    rules = [f"{name} ::= {random_part(choice, 2, names)}" for name in names]
    return "\n".join([f"root ::= {random_part(choice, 3, names)}", *rules])


def ends_of(rules: dict[str, Node], text: str) -> set[int]:
    """Where a text that the grammar writes may end in `text`, by the definition of each part, until
    nothing is new.
    """
    ends_found: dict[tuple[int, int], set[int]] = {}

    def ends(node: Node, start: int) -> set[int]:
        node = rules[node.name] if isinstance(node, Ref) else node
        return ends_found.setdefault((id(node), start), set())

    def after(node: Node, starts: set[int]) -> set[int]:
        return {end for start in starts for end in ends(node, start)}

    def new_ends(node: Node, start: int) -> set[int]:
        if isinstance(node, Chars):
            fits = start < len(text) and any(
                low <= ord(text[start]) <= high for low, high in node.ranges
            )
            return {start + 1} if fits else set()

        if isinstance(node, Either):
            return set().union(*(ends(part, start) for part in node.parts))

        reached = {start}
        if isinstance(node, Joined):
            for part in node.parts:
                reached = after(part, reached)

            return reached

        assert isinstance(node, Repeat)
        all_ends = set(reached) if node.least == 0 else set()
        for count in range(1, (node.most or node.least + len(text) + 1) + 1):
            reached = after(node.part, reached)
            all_ends |= reached if count >= node.least else set()

        return all_ends

    def parts(node: Node) -> list[Node]:
        inner = [node.part] if isinstance(node, Repeat) else getattr(node, "parts", ())
        return [
            *(inner_part for part in inner for inner_part in parts(part)),
            *([] if isinstance(node, Ref) else [node]),
        ]

    nodes = [node for rule in rules.values() for node in parts(rule)]
    is_changed = True
    while is_changed:
        is_changed = False
        for node, start in itertools.product(nodes, range(len(text) + 1)):
            known_ends = ends(node, start)
            new = new_ends(node, start) - known_ends
            known_ends |= new
            is_changed = is_changed or bool(new)

    return ends(rules["root"], 0)


def test_a_text_fits_where_the_definition_of_the_grammar_says_so() -> None:
    """Checked with lexemes and by characters, against a parser that knows neither."""
    ids = {letter: number + 1 for number, letter in enumerate(LETTERS)}
    small = new_tokenizer(
        GuidedDecodingConfig(["<end>", *LETTERS], stop_token_ids=[0]), len(LETTERS) + 1
    )
    texts = [
        "".join(letters) for size in range(5) for letters in itertools.product(LETTERS, repeat=size)
    ]
    for seed in range(60):
        choice = random.Random(seed)
        rules = read_grammar(random_grammar(choice))
        larks = [lark_of_ebnf(rules, has_lexemes=has_lexemes) for has_lexemes in (True, False)]
        followers = [new_matcher(small, LLMatcher.grammar_from_lark(lark)) for lark in larks]
        for text in choice.sample(texts, 20):
            fits = len(text) in ends_of(rules, text)
            for follower in followers:
                copy = follower.deep_copy()
                is_read = copy.try_consume_tokens([ids[letter] for letter in text]) == len(text)

                assert (is_read and copy.is_accepting()) == fits, (seed, text, larks)


@pytest.mark.parametrize(
    ("count", "least", "most"),
    [
        ("{2}", 2, 2),
        ("{\t2\n}", 2, 2),
        ("{1,\t3 }", 1, 3),
        ("{1 ,\n}", 1, None),
        ("{ 1,\t-1\r\n}", 1, None),
    ],
)
def test_a_count_may_have_white_space_of_any_kind(count: str, least: int, most: int | None) -> None:
    repeated = read_grammar(f'root ::= "a"{count}')["root"]
    assert isinstance(repeated, Repeat)
    assert (repeated.least, repeated.most) == (least, most)


def test_the_text_of_a_string_of_json_is_one_lexeme() -> None:
    """Read by its characters, a mask takes milliseconds."""
    assert any(
        "[\\x{22}](?:" in line and ")*[\\x{22}]" in line
        for line in lark_of_ebnf(read_grammar(JSON), has_lexemes=True).split("\n")
    )
