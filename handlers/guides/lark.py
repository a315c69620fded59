"""Writes clients' grammars in EBNF and regular expressions as llguidance reads them: its Lark and
Rust's `regex` crate.

llguidance reads an answer in lexemes, each as long as possible. One character is always a right
lexeme, but the longer the text, the longer its mask takes. So a regular part of a grammar becomes a
lexeme where that changes nothing. In a text of 1,300 characters inside of JSON a mask takes 0.03 ms
so (the median, at a vocabulary of 48,000), and 1.4 ms by characters. Words take 35 times as long by
characters, lists and tables 5 to 7 times, SQL 2.3 times; sums, games and programs as long.

llguidance's own `gbnf_to_lark` (of 1.9.1) makes every regular rule a lexeme, whatever may follow
it. Of the grammars in tests/handlers/guides/test_ebnf.py it reads 7 of the 9 long ones as they are
meant, and 3 of the 13 short ones.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple

from handlers.guides.ebnf import Chars, Either, Joined, Node, Ranges, Ref, Repeat

# The regular expression of a lexeme has at most so many characters.
MAX_LEXEME_CHARS = 2_000
MAX_PASSES = 20
MAX_PLACES = 4_000
MAX_PAIRS = 100_000
TOKEN = re.compile(r"\\(?:[xuU]\{[0-9A-Fa-f]*\}|[pP]\{[^}]*\}|.)|.|\\", re.DOTALL)
NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
WIDE = {"d": r"\p{N}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\p{Z}\t\n\r\f\v\x1c-\x1f\x{85}"}
CLASSES = "dDwWsSpP"
# Letters that have another meaning in a class of Rust's.
IN_CLASS = "[&~"
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
    while regexes:
        wrong = _Places(rules, regexes).wrong_lexemes()
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


class _Lexeme(NamedTuple):
    """A lexeme of the automaton: its states, and the range of its places."""

    first_state: int
    last_state: int
    first_place: int
    end_place: int


class _Places:
    """The automaton of a grammar without a stack: states, steps between them that read nothing, and
    places.

    A place is a character of the grammar, and a set of places an integer with a bit for each. It
    may say that more follows than does, since nobody asks where a rule is called from. Then a part
    that might be a lexeme is none.
    """

    def __init__(self, rules: dict[str, Node], regexes: dict[int, str]) -> None:
        self._rules = rules
        self._regexes = regexes
        # The states that each state reaches without a character.
        self._steps: list[list[int]] = []
        # The places that begin at each state.
        self._places: list[list[int]] = []
        # The characters of each place.
        self._chars: list[Ranges] = []
        # The state after each place.
        self._ends: list[int] = []
        self._lexemes: dict[str, _Lexeme] = {}

        # The first and the last state of each rule.
        self._rule_states = {name: (self._state(), self._state()) for name in rules}
        for name, node in rules.items():
            first, last = self._rule_states[name]
            self._build(node, first, last)

    def wrong_lexemes(self) -> set[str]:
        """The lexemes that would change the language; all if that takes too long to find out."""
        mixed = self._mixed() if len(self._chars) <= MAX_PLACES else None
        if mixed is None:
            return set(self._regexes.values())

        wrong = set()
        for regex, lexeme in self._lexemes.items():
            if self._is_wrong(lexeme, mixed):
                wrong.add(regex)

        return wrong

    def _is_wrong(self, lexeme: _Lexeme, mixed: list[int]) -> bool:
        """Whether a lexeme may end in two places, or something outside it reads its characters."""
        last = lexeme.last_state
        places = range(lexeme.first_place, lexeme.end_place)
        inside = (1 << lexeme.end_place) - (1 << lexeme.first_place)

        goes_on = 0
        for place in places:
            if last in self._walk(self._ends[place]):
                for end_place in _bits(mixed[place] & inside | 1 << place):
                    goes_on |= self._reachable(self._ends[end_place], without=last)

        follows = self._reachable(last)
        if self._first_bytes(goes_on) & self._first_bytes(follows):
            return True

        return any(mixed[place] & ~inside for place in places)

    def _state(self) -> int:
        self._steps.append([])
        self._places.append([])
        return len(self._steps) - 1

    def _build(self, node: Node, first: int, last: int, *, is_inside: bool = False) -> None:
        """Add a part between two states. `is_inside` says that it is a part of a lexeme."""
        if len(self._chars) > MAX_PLACES:
            return

        if isinstance(node, Ref) and is_inside:
            self._build(self._rules[node.name], first, last, is_inside=True)
        elif isinstance(node, Chars):
            self._places[first].append(len(self._chars))
            self._chars.append(node.ranges)
            self._ends.append(last)
        elif isinstance(node, Ref):
            begin, end = self._rule_states[node.name]
            self._steps[first].append(begin)
            self._steps[end].append(last)
        elif id(node) in self._regexes and not is_inside:
            lexeme = self._lexeme(node)
            self._steps[first].append(lexeme.first_state)
            self._steps[lexeme.last_state].append(last)
        elif isinstance(node, Either):
            for part in node.parts:
                self._build(part, first, last, is_inside=is_inside)
        elif isinstance(node, Joined):
            for part in node.parts:
                end = self._state()
                self._build(part, first, end, is_inside=is_inside)
                first = end

            self._steps[first].append(last)
        else:
            begin = self._state()
            end = self._state()
            self._build(node.part, begin, end, is_inside=is_inside)
            self._steps[first] += [begin] if node.least else [begin, last]
            self._steps[end] += [last] if node.most == 1 else [last, begin]

    def _lexeme(self, node: Node) -> _Lexeme:
        """The lexeme of a part, which is one thing wherever it stands."""
        regex = self._regexes[id(node)]
        if regex not in self._lexemes:
            first = self._state()
            last = self._state()
            first_place = len(self._chars)
            self._build(node, first, last, is_inside=True)
            self._lexemes[regex] = _Lexeme(first, last, first_place, len(self._chars))

        return self._lexemes[regex]

    def _walk(self, first: int, without: int = -1) -> set[int]:
        """The states that are reached without a character, and not through the state `without`."""
        reached = {first}
        pending = [first]
        while pending:
            state = pending.pop()
            if state == without:
                continue

            new = set(self._steps[state]) - reached
            pending += new
            reached |= new

        return reached

    def _reachable(self, first: int, without: int = -1) -> int:
        """The places that may be next at a state."""
        states = self._walk(first, without) - {without}
        return sum(1 << place for state in states for place in self._places[state])

    def _mixed(self) -> list[int] | None:
        """For each place, the other places that may read the same character of the same text; None
        if there are too many.
        """
        same = self._overlapping()
        mixed = [0] * len(self._chars)
        nexts = [self._reachable(state) for state in self._ends]
        begin = self._reachable(self._rule_states["root"][0])

        # Pairs of sets of places that may be next in the same text.
        pending = [(places, places) for places in (begin, *nexts)]
        num_pairs = 0
        while pending:
            places, rivals = pending.pop()
            for place in _bits(places):
                new = rivals & same[place] & ~mixed[place] & ~(1 << place)
                mixed[place] |= new
                for rival in _bits(new):
                    mixed[rival] |= 1 << place
                    pending.append((nexts[place], nexts[rival]))
                    num_pairs += 1

            if num_pairs > MAX_PAIRS:
                return None

        return mixed

    def _overlapping(self) -> list[int]:
        """For each place, those that have a character in common with it."""
        edges: set[int] = set()
        for ranges in self._chars:
            for low, high in ranges:
                edges |= {low, high + 1}

        # All characters from one edge to the next are in the same places: they are a piece.
        begins = sorted(edges)
        pieces: list[list[int]] = []
        for ranges in self._chars:
            pieces_of_place: list[int] = []
            for low, high in ranges:
                first = bisect_left(begins, low)
                end = bisect_left(begins, high + 1)
                pieces_of_place += begins[first:end]

            pieces.append(pieces_of_place)

        holders = dict.fromkeys(begins, 0)
        for place, pieces_of_place in enumerate(pieces):
            for piece in pieces_of_place:
                holders[piece] |= 1 << place

        overlapping = []
        for pieces_of_place in pieces:
            overlapping.append(reduce(or_, map(holders.__getitem__, pieces_of_place)))

        return overlapping

    def _first_bytes(self, places: int) -> set[int]:
        """The first bytes of the UTF-8 of their characters, which has the order of the characters.
        Some of a range may begin no character.
        """
        first_bytes: set[int] = set()
        for place in _bits(places):
            for low, high in self._chars[place]:
                first = chr(low).encode()[0]
                last = chr(high).encode()[0]
                first_bytes.update(range(first, last + 1))

        return first_bytes


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
    begin = ""
    end = ""
    if is_in_json:
        begin = "["
        end = f"&&{WRITABLE}]"

    parts: list[str] = []
    # The parts of the class that is open.
    inside: list[str] = []
    for token in TOKEN.findall(pattern):
        if token == "\\":
            raise ValueError("the regular expression ends with a backslash")

        is_class = token[0] == "\\" and token[1] in CLASSES
        if is_class and token[1].lower() in NARROW:
            is_negated = token[1].isupper()
            is_in_negation = inside[:2] == ["[", "^"]
            letters = WIDE if is_negated != is_in_negation else NARROW
            sign = "^" if is_negated else ""
            token = f"[{sign}{letters[token[1].lower()]}]"

        has_begun = inside in (["["], ["[", "^"])
        if not inside and token == "[":
            inside = [token]
        elif not inside:
            text = OF_A_LINE if token == "." and is_in_json else token
            parts.append(f"{begin}{text}{end}" if is_class else text)
        elif token == "]" and not has_begun:
            parts.append(f"{begin}{''.join(inside)}]{end}")
            inside = []
        elif token in IN_CLASS or (token == "-" and (has_begun or inside[-1] == "-")):
            inside.append("\\" + token)
        else:
            inside.append(token)

    return "".join(parts + inside)
