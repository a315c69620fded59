"""Writes clients' grammars in EBNF in the Lark that llguidance reads.

llguidance reads an answer in lexemes, each as long as possible. One character is always a right
lexeme, but the longer the text, the longer its mask takes. So a regular part of a grammar becomes a
lexeme where that changes nothing. In a text of 1,300 characters inside of JSON a mask takes 0.03 ms
so (the median, at a vocabulary of 48,000), and 1.4 ms by characters. Words take 35 times as long by
characters, lists and tables 5 to 7 times, SQL 2.3 times; sums, games and programs as long.

llguidance's own `gbnf_to_lark` (of 1.9.1) makes every regular rule a lexeme, whatever may follow
it. Of the grammars in tests/handlers/guides/test_ebnf.py it reads 7 of the 9 long ones as they are
meant, and 3 of the 13 short ones.
"""

from handlers.guides.char_ranges import Ranges
from handlers.guides.grammar import Chars, Joined, Node, Ref, Repeat
from handlers.guides.lexeme_places import LexemePlaces

# The regular expression of a lexeme has at most so many characters.
MAX_LEXEME_CHARS = 2_000
MAX_PASSES = 20


def lark_of_ebnf(rules: dict[str, Node], *, has_lexemes: bool) -> str:
    """Without lexemes it reads by characters. A part may be a lexeme under two conditions.

    What may follow it begins with no byte that may also go on with it, so it ends in one place:
    with the lexeme `[a-z]+` no text fits `[a-z]+ "b"`. And while it is read, nothing outside it can
    read the same characters.
    """
    regexes = _regexes(rules) if has_lexemes else {}
    while regexes:
        wrong = LexemePlaces(rules, regexes).wrong_lexemes()
        if not wrong:
            break

        regexes = {key: regex for key, regex in regexes.items() if regex not in wrong}

    names: dict[str, str] = {}
    for number, name in enumerate(rules):
        names[name] = "start" if name == "root" else f"r{number}"

    lines = []
    for name, node in rules.items():
        lines.append(f"{names[name]}: {_lark(node, names, regexes)}")

    return "\n".join(lines)


def _lark(node: Node, names: dict[str, str], regexes: dict[int, str]) -> str:
    if id(node) in regexes:
        regex = regexes[id(node)]
        return f"/{regex}/" if regex else '""'

    if isinstance(node, Chars):
        return f"/{_class(node.ranges)}/"

    if isinstance(node, Ref):
        return names[node.name]

    if isinstance(node, Repeat):
        return f"({_lark(node.part, names, regexes)}){_count(node)}"

    parts = [_lark(part, names, regexes) for part in node.parts] or ['""']
    if isinstance(node, Joined):
        return " ".join(parts)

    return f"({' | '.join(parts)})"


def _regexes(rules: dict[str, Node]) -> dict[int, str]:
    """The regular expressions of the regular parts, by the ids of their nodes; that of a name
    stands in its rule.
    """
    regexes: dict[int, str] = {}
    num_known = -1
    # A rule may come before those that it needs.
    for _ in range(MAX_PASSES):
        if num_known == len(regexes):
            break

        num_known = len(regexes)
        for node in reversed(rules.values()):
            _note_regex(node, rules, regexes)

    return {key: regex for key, regex in regexes.items() if len(regex) <= MAX_LEXEME_CHARS}


def _note_regex(node: Node, rules: dict[str, Node], regexes: dict[int, str]) -> str | None:
    if id(node) in regexes:
        return regexes[id(node)]

    if isinstance(node, Ref):
        return regexes.get(id(rules[node.name]))

    if isinstance(node, Chars):
        regex = _class(node.ranges)
    else:
        inner = [node.part] if isinstance(node, Repeat) else node.parts
        parts = [_note_regex(part, rules, regexes) for part in inner]
        texts = [part for part in parts if part is not None]
        if len(texts) < len(parts) or sum(map(len, texts)) > MAX_LEXEME_CHARS:
            return None

        if isinstance(node, Repeat):
            regex = f"(?:{texts[0]}){_count(node)}"
        elif isinstance(node, Joined):
            regex = "".join(texts)
        else:
            regex = f"(?:{'|'.join(texts)})"

    regexes[id(node)] = regex
    return regex


def _count(node: Repeat) -> str:
    match (node.least, node.most):
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"

    most = "" if node.most is None else node.most
    return f"{{{node.least},{most}}}"


def _class(ranges: Ranges) -> str:
    spans = []
    for low, high in ranges:
        span = _letter(low)
        if high > low:
            span += f"-{_letter(high)}"

        spans.append(span)

    return f"[{''.join(spans)}]"


def _letter(code: int) -> str:
    letter = chr(code)
    if letter.isascii() and letter.isalnum():
        return letter

    return f"\\x{{{code:x}}}"
