"""Tells a client's grammar in Lark from one in EBNF, and refuses what llguidance reads in it beyond
Lark.

    start: "yes" | "no" | NUMBER      // names in capitals are read as one piece
    NUMBER: /[0-9]+/
    %import common.WS
    %ignore WS

Source: Lark's reference of grammars.
"""

import re

from handlers.guides.places import place_in

# The first rule decides. A line that begins with a comment or a directive has none.
DEFINITION = re.compile(
    r"^[ \t]*[?!]{0,2}[A-Za-z_][\w.-]*(?:\[[^\]\n]*\])?\s*(::=|:)", re.MULTILINE
)
PIECE = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*) | (?P<text>"(?:\\.|[^"\\\n])*")
    | (?P<regex>/(?:\\.|[^/\\\n])+/)
    | (?P<directive>%\w+) | (?P<special><[^<>\n]*>) | (?P<attributes>\w\[[^\]\n]*\][ \t]*:)""",
    re.VERBOSE,
)
DIRECTIVES = ("%import", "%ignore")
REFUSED = {
    "directive": "{piece} is not followed here, only %import and %ignore",
    "special": "{piece}: special tokens are no part of a structure",
    "attributes": "attributes of a rule are not followed here",
}


def is_lark(grammar: str) -> bool:
    """Whether a grammar is written in Lark, whose rules have a colon where those of EBNF have
    `::=`.
    """
    first = DEFINITION.search(grammar)
    return first is not None and first[1] == ":"


def check_lark(grammar: str) -> None:
    """Raise ValueError, with the place, for what is no Lark: it would allow more than a structure
    may.
    """
    for match in PIECE.finditer(grammar):
        kind = str(match.lastgroup)
        piece = match.group()
        if kind in REFUSED and piece not in DIRECTIVES:
            reason = REFUSED[kind].format(piece=piece)
            raise ValueError(f"{place_in(grammar, match.start())}: {reason}")
