"""Writes clients' grammars in EBNF and regular expressions as llguidance reads them: its Lark and
Rust's `regex` crate.

llguidance reads an answer in lexemes, each as long as possible. One character is always a right
lexeme, but a mask of a long text by characters takes milliseconds. So a regular part of a grammar
becomes a lexeme where that changes nothing.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import reduce
from operator import or_

from handlers.guides.ebnf import Chars, Either, Joined, Node, Ranges, Ref, Repeat

MAX_LEXEME_CHARS = 2_000  # of its regular expression
MAX_PASSES = 20
MAX_PLACES = 4_000
MAX_PAIRS = 100_000
TOKEN = re.compile(r"\\(?:[xuU]\{[0-9A-Fa-f]*\}|[pP]\{[^}]*\}|.)|.|\\", re.DOTALL)
NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
WIDE = {"d": r"\p{N}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\p{Z}\t\n\r\f\v\x1c-\x1f\x{85}"}
CLASSES = "dDwWsSpP"
IN_CLASS = "[&~"  # of another meaning in a class of Rust's
# What an answer in JSON may have. llguidance 1.9.1 takes a class of all control characters for one
# of all characters: `[^"]` would allow a quote with its backslash.
WRITABLE = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
OF_A_LINE = r"[^\n\x00-\x07\x0b\x0e-\x1f\x7f]"


def lark_of_ebnf(rules: dict[str, Node], *, has_lexemes: bool) -> str:
    """Without lexemes it reads by characters. A part may be a lexeme under two conditions.

    What may follow it begins with no byte that may also go on with it, so it ends in one place:
    with the lexeme `[a-z]+` no text fits `[a-z]+ "b"`. And while it is read, nothing outside it can
    read the same characters.
    """
    regexes = _regexes(rules) if has_lexemes else {}
    while regexes and (wrong := _Places(rules, regexes).wrong_lexemes()):
        regexes = {key: regex for key, regex in regexes.items() if regex not in wrong}

    names = {name: "start" if name == "root" else f"r{number}" for number, name in enumerate(rules)}
    return "\n".join(
        f"{names[name]}: {_lark(node, names, regexes)}" for name, node in rules.items()
    )


def _lark(node: Node, names: dict[str, str], regexes: dict[int, str]) -> str:
    if id(node) in regexes:
        return f"/{regexes[id(node)]}/" if regexes[id(node)] else '""'

    if isinstance(node, Chars):
        return f"/{_class(node.ranges)}/"

    if isinstance(node, Ref):
        return names[node.name]

    if isinstance(node, Repeat):
        return f"({_lark(node.part, names, regexes)}){_count(node)}"

    parts = [_lark(part, names, regexes) for part in node.parts] or ['""']
    return " ".join(parts) if isinstance(node, Joined) else f"({' | '.join(parts)})"


def _regexes(rules: dict[str, Node]) -> dict[int, str]:
    """The regular expressions of the regular parts, by the ids of their nodes; that of a name
    stands in its rule.
    """
    regexes: dict[int, str] = {}
    num_known = -1
    for _ in range(MAX_PASSES):  # a rule may come before those that it needs
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
        else:
            regex = "".join(texts) if isinstance(node, Joined) else f"(?:{'|'.join(texts)})"

    regexes[id(node)] = regex
    return regex


def _count(node: Repeat) -> str:
    marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return marks.get(
        (node.least, node.most), f"{{{node.least},{'' if node.most is None else node.most}}}"
    )


def _class(ranges: Ranges) -> str:
    spans = (_letter(low) + (f"-{_letter(high)}" if high > low else "") for low, high in ranges)
    return f"[{''.join(spans)}]"


def _letter(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"


class _Places:
    """The automaton of a grammar without a stack: states, steps between them that read nothing, and
    places.

    A place is a character of the grammar, and a set of places an integer with a bit for each. More
    may follow here than does, since nobody asks where a rule is called from; then a part that might
    be a lexeme is none.
    """

    def __init__(self, rules: dict[str, Node], regexes: dict[int, str]) -> None:
        self._rules = rules
        self._regexes = regexes
        self._steps: list[list[int]] = []  # from each state to others, without a character
        self._places: list[list[int]] = []  # that begin at each state
        self._chars: list[Ranges] = []  # of each place
        self._ends: list[int] = []  # the state after each place
        self._lexemes: dict[
            str, tuple[int, int, int, int]
        ] = {}  # first and last state, and the range of places
        self._rule_states = {name: (self._state(), self._state()) for name in rules}
        for name, node in rules.items():
            self._build(node, *self._rule_states[name])

    def wrong_lexemes(self) -> set[str]:
        """The lexemes that would change the language; all if that takes too long to find out."""
        mixed = self._mixed() if len(self._chars) <= MAX_PLACES else None
        if mixed is None:
            return set(self._regexes.values())

        wrong = set()
        for regex, (_, last, low, high) in self._lexemes.items():
            inside = (1 << high) - (1 << low)
            goes_on = 0
            for place in range(low, high):
                if last in self._walk(self._ends[place]):
                    for other in _bits(mixed[place] & inside | 1 << place):
                        goes_on |= self._reachable(self._ends[other], without=last)

            has_two_ends = self._first_bytes(goes_on) & self._first_bytes(self._reachable(last))
            if has_two_ends or any(mixed[place] & ~inside for place in range(low, high)):
                wrong.add(regex)

        return wrong

    def _state(self) -> int:
        self._steps.append([])
        self._places.append([])
        return len(self._steps) - 1

    def _build(self, node: Node, first: int, last: int, *, is_inside: bool = False) -> None:
        """Add a part between two states. `is_inside`: of a lexeme."""
        if len(self._chars) > MAX_PLACES:
            return

        if isinstance(node, Ref) and is_inside:
            self._build(self._rules[node.name], first, last, is_inside=True)
        elif isinstance(node, Chars):
            self._places[first].append(len(self._chars))
            self._chars.append(node.ranges)
            self._ends.append(last)
        elif isinstance(node, Ref) or (id(node) in self._regexes and not is_inside):
            begin, end = (
                self._rule_states[node.name] if isinstance(node, Ref) else self._lexeme(node)
            )
            self._steps[first].append(begin)
            self._steps[end].append(last)
        elif isinstance(node, Either):
            for part in node.parts:
                self._build(part, first, last, is_inside=is_inside)
        elif isinstance(node, Joined):
            for part in node.parts:
                self._build(part, first, end := self._state(), is_inside=is_inside)
                first = end

            self._steps[first].append(last)
        else:
            begin = self._state()
            end = self._state()
            self._build(node.part, begin, end, is_inside=is_inside)
            self._steps[first] += [begin] if node.least else [begin, last]
            self._steps[end] += [last] if node.most == 1 else [last, begin]

    def _lexeme(self, node: Node) -> tuple[int, int]:
        """The first and the last state of a lexeme, which is one thing wherever it stands."""
        regex = self._regexes[id(node)]
        if regex not in self._lexemes:
            first = self._state()
            last = self._state()
            low = len(self._chars)
            self._build(node, first, last, is_inside=True)
            self._lexemes[regex] = first, last, low, len(self._chars)

        return self._lexemes[regex][:2]

    def _walk(self, first: int, without: int = -1) -> set[int]:
        """The states that are reached without a character, and not through one of them."""
        seen = {first}
        pending = [first]
        while pending:
            if (state := pending.pop()) != without:
                pending += (new := set(self._steps[state]) - seen)
                seen |= new

        return seen

    def _reachable(self, first: int, without: int = -1) -> int:
        """The places that may be next at a state."""
        states = self._walk(first, without) - {without}
        return sum(1 << place for state in states for place in self._places[state])

    def _mixed(self) -> list[int] | None:
        """For each place, others that may read the same character of the same text; None if there
        are too many.
        """
        same = self._overlapping()
        mixed = [0] * len(self._chars)
        nexts = [self._reachable(state) for state in self._ends]
        begin = self._reachable(self._rule_states["root"][0])
        pending = [
            (begin, begin),
            *((places, places) for places in nexts),
        ]  # that may be next in the same text
        num_pairs = 0
        while pending:
            ones, others = pending.pop()
            for place in _bits(ones):
                new = others & same[place] & ~mixed[place] & ~(1 << place)
                mixed[place] |= new
                for other in _bits(new):
                    mixed[other] |= 1 << place
                    pending.append((nexts[place], nexts[other]))
                    num_pairs += 1

            if num_pairs > MAX_PAIRS:
                return None

        return mixed

    def _overlapping(self) -> list[int]:
        """For each place, those that have a character in common with it."""
        edges = sorted(
            {edge for ranges in self._chars for low, high in ranges for edge in (low, high + 1)}
        )
        pieces = [
            [
                piece
                for low, high in ranges
                for piece in edges[bisect_left(edges, low) : bisect_left(edges, high + 1)]
            ]
            for ranges in self._chars
        ]
        holders = dict.fromkeys(edges, 0)
        for place, own in enumerate(pieces):
            for piece in own:
                holders[piece] |= 1 << place

        return [reduce(or_, (holders[piece] for piece in own)) for own in pieces]

    def _first_bytes(self, places: int) -> set[int]:
        """Of the UTF-8 of their characters, which has their order. A range may have some that begin
        no character.
        """
        ranges = [one for place in _bits(places) for one in self._chars[place]]
        return {
            byte
            for low, high in ranges
            for byte in range(chr(low).encode()[0], chr(high).encode()[0] + 1)
        }


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


def rust_regex(pattern: str, *, is_in_json: bool = False) -> str:
    r"""Raises ValueError for what Rust would read as something else.

    `\d`, `\w` and `\s` are of ASCII in some languages and of Unicode in others: what is written
    fits both. In a class `[`, `&&`, `--` and `~~` are letters, as in Python and JavaScript.
    """
    begin, end = ("[", f"&&{WRITABLE}]") if is_in_json else ("", "")
    written: list[str] = []
    inside: list[str] = []  # of the class that is open
    for token in TOKEN.findall(pattern):
        if token == "\\":
            raise ValueError("the regular expression ends with a backslash")

        is_class = token[0] == "\\" and token[1] in CLASSES
        if is_class and token[1].lower() in NARROW:
            is_negated = token[1].isupper()
            letters = WIDE if is_negated != (inside[:2] == ["[", "^"]) else NARROW
            token = f"[{'^' if is_negated else ''}{letters[token[1].lower()]}]"

        has_begun = inside in (["["], ["[", "^"])
        if not inside and token == "[":
            inside = [token]
        elif not inside:
            text = OF_A_LINE if token == "." and is_in_json else token
            written.append(f"{begin}{text}{end}" if is_class else text)
        elif token == "]" and not has_begun:
            written.append(f"{begin}{''.join(inside)}]{end}")
            inside = []
        elif token in IN_CLASS or (token == "-" and (has_begun or inside[-1] == "-")):
            inside.append("\\" + token)
        else:
            inside.append(token)

    return "".join(written + inside)
