"""The automaton of a grammar, by which a writer of Lark finds the parts that may be lexemes."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple

from handlers.guides.char_ranges import Ranges
from handlers.guides.grammar import Chars, Either, Joined, Node, Ref

MAX_PLACES = 4_000
MAX_PAIRS = 100_000


class _Lexeme(NamedTuple):
    """A lexeme of the automaton: its states, and the range of its places."""

    first_state: int
    last_state: int
    first_place: int
    end_place: int


class LexemePlaces:
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
