"""Writes clients' grammars in EBNF in the Lark that llguidance reads.

llguidance reads an answer in lexemes, each as long as possible. One character is always a right
lexeme, but the longer the text, the longer its mask takes. So a regular part of a grammar becomes a
lexeme where that changes nothing. How much it saves: tests/handlers/guides/test_ebnf.py.
"""

from handlers.guides.char_ranges import Ranges
from handlers.guides.grammar import Chars, Joined, Node, Ref, Repeat
from handlers.guides.lexeme_places import LexemePlaces

# The regular expression of a lexeme has at most so many characters.
MAX_LEXEME_CHARS = 2_000
# Passes over the rules in search of regular ones. What more passes would find is read by
# characters: that allows the same texts, but its masks take longer.
MAX_PASSES = 20


def lark_of_ebnf(rules: dict[str, Node], *, has_lexemes: bool) -> str:
    """Return the grammar in Lark: a line for each rule, of which `root` is named `start`.

    With `has_lexemes` each regular part becomes a lexeme under two conditions; all others, and all
    parts without it, are read by characters. First, what may follow the part begins with no byte
    that may also go on with it, so that it ends in one place: with the lexeme `[a-z]+` no text fits
    `[a-z]+ "b"`. Second, while the part is read, nothing outside it can read the same characters.
    """
    regexes = _regexes(rules) if has_lexemes else {}
    while regexes:
        wrong_regexes = LexemePlaces(rules, regexes).wrong_lexemes()
        if not wrong_regexes:
            break

        # Parts of the same regular expression are one lexeme in Lark.
        regexes = {
            node_id: regex for node_id, regex in regexes.items() if regex not in wrong_regexes
        }

    names: dict[str, str] = {}
    for number, name in enumerate(rules):
        names[name] = "start" if name == "root" else f"r{number}"

    lines = []
    for name, node in rules.items():
        lines.append(f"{names[name]}: {_lark(node, names, regexes)}")

    return "\n".join(lines)


def _lark(node: Node, names: dict[str, str], regexes: dict[int, str]) -> str:
    """Return a part in Lark. `names` has Lark's names of the rules."""
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
    """Return the regular expressions of the regular parts, by the ids of their nodes: to hash a
    node would hash all parts of it. That of a name stands in its rule.
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

    return {node_id: regex for node_id, regex in regexes.items() if len(regex) <= MAX_LEXEME_CHARS}


def _note_regex(node: Node, rules: dict[str, Node], regexes: dict[int, str]) -> str | None:
    """Note the regular expressions of a part and of all parts in it. Returns that of the part, or
    None if it is not regular, too long, or needs a rule whose own is not known yet.
    """
    if id(node) in regexes:
        return regexes[id(node)]

    if isinstance(node, Ref):
        return regexes.get(id(rules[node.name]))

    if isinstance(node, Chars):
        regex = _class(node.ranges)
    else:
        parts = [node.part] if isinstance(node, Repeat) else node.parts
        # All are noted, also where one of them is not regular.
        noted_regexes = [_note_regex(part, rules, regexes) for part in parts]
        part_regexes = [regex for regex in noted_regexes if regex is not None]
        if len(part_regexes) < len(parts) or sum(map(len, part_regexes)) > MAX_LEXEME_CHARS:
            return None

        if isinstance(node, Repeat):
            regex = f"(?:{part_regexes[0]}){_count(node)}"
        elif isinstance(node, Joined):
            regex = "".join(part_regexes)
        else:
            regex = f"(?:{'|'.join(part_regexes)})"

    regexes[id(node)] = regex
    return regex


def _count(node: Repeat) -> str:
    """Return how often a part is repeated, as Lark and regular expressions write it."""
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
    """Return the class of a regular expression that has these characters."""
    spans = []
    for low, high in ranges:
        span = _letter(low)
        if high > low:
            span += f"-{_letter(high)}"

        spans.append(span)

    return f"[{''.join(spans)}]"


def _letter(code: int) -> str:
    """Return a character in a class, escaped unless it is an ASCII letter or digit."""
    letter = chr(code)
    if letter.isascii() and letter.isalnum():
        return letter

    return f"\\x{{{code:x}}}"
