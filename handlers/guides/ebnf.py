"""Reads a grammar in EBNF, as llama.cpp (GBNF) and xgrammar write it. What it does not know is
refused with its place.

root ::= "a" [0-9]{1,3} (word | "\\n")*   # a rule goes up to the next one's name
word ::= [^a-z\\]]+ .                     # . is any character
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_NODES = 50_000
MAX_LEVELS = 100
LAST = 0x10FFFF  # of Unicode
SURROGATES = (0xD800, 0xDFFF)
TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+) | (?P<name>[A-Za-z_][\w.-]*) | (?P<define>::=)
    | (?P<text>"(?:\\.|[^"\\\n])*")
    | (?P<chars>\[(?:\\.|[^\]\\\n])*\]) | (?P<count>\{\s*\d+\s*(?:,\s*(?:-1|\d*)\s*)?\})
    | (?P<mark>[|()*+?.])""",
    re.VERBOSE | re.ASCII,
)
CHAR = r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|[^\\]"
RANGE = re.compile(f"({CHAR})(?:-({CHAR}))?", re.DOTALL)
ESCAPED = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "0": "\0",
}
COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}

Ranges = tuple[tuple[int, int], ...]


class Chars(NamedTuple):
    """One character of these ranges."""

    ranges: Ranges


class Ref(NamedTuple):
    name: str


class Repeat(NamedTuple):
    part: Node
    least: int
    most: int | None


class Joined(NamedTuple):
    parts: tuple[Node, ...]


class Either(NamedTuple):
    parts: tuple[Node, ...]


Node = Chars | Ref | Repeat | Joined | Either


def read_grammar(text: str) -> dict[str, Node]:
    """The rules of a grammar; `root` is among them. Raises ValueError."""
    return _GrammarReader(text).rules()


class _GrammarReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        self._used = {"root": 0}  # the names of rules, and where each is used first
        self._num_nodes = self._level = at = 0
        while at < len(text):
            if (found := TOKEN.match(text, at)) is None:
                raise self._fault(at, f"{text[at]} is not known")

            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found.group(), at))

            at = found.end()

        self._tokens += [("end", "the end", len(text))] * 2
        self._next = -1
        self._go_on()

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind != "end":
            name = self._take("name", "rule's name")
            at = self._at
            self._take("::=")
            if name in rules:
                raise self._fault(at, f'rule "{name}" is there twice')

            rules[name] = self._either()

        for name, at in self._used.items():
            if name not in rules:
                raise self._fault(at, f'Rule "{name}" is not defined')

        return rules

    def _go_on(self) -> None:
        self._next += 1
        self._kind, self._written, self._at = self._tokens[self._next]

    def _take(self, wanted: str, title: str = "") -> str:
        """Go on behind a token that is of a kind, or is written so."""
        written = self._written
        if wanted not in (self._kind, written):
            raise self._fault(self._at, f"{written} where a {title or wanted} must stand")

        self._go_on()
        return written

    def _either(self) -> Node:
        parts = [self._joined()]
        while self._written == "|":
            self._go_on()
            parts.append(self._joined())

        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _joined(self) -> Node:
        parts: list[Node] = []
        while self._kind in ("text", "chars", "name") or self._written in ("(", "."):
            if self._kind == "name" and self._tokens[self._next + 1][0] == "define":
                break  # the next rule

            parts.append(self._counted(self._single()))

        return parts[0] if len(parts) == 1 else Joined(tuple(parts))

    def _single(self) -> Node:
        kind = self._kind
        written = self._written
        at = self._at
        self._go_on()
        self._num_nodes += len(written) if kind == "text" else 1
        if self._num_nodes > MAX_NODES:
            raise self._fault(at, f"the grammar has more than {MAX_NODES} parts")

        if kind == "text":
            chars = re.finditer(CHAR, written[1:-1], re.DOTALL)
            codes = [self._code(char[0], at + 1 + char.start()) for char in chars]
            parts = tuple(Chars(((code, code),)) for code in codes)
            return parts[0] if len(parts) == 1 else Joined(parts)

        if kind == "chars":
            return Chars(self._ranges(written[1:-1], at + 1))

        if written == ".":
            return Chars(without_surrogates(((0, LAST),)))

        if kind == "name":
            self._used.setdefault(written, at)
            return Ref(written)

        self._level += 1
        if self._level > MAX_LEVELS:
            raise self._fault(at, f"more than {MAX_LEVELS} parentheses stand in each other")

        node = self._either()
        self._take(")")
        self._level -= 1
        return node

    def _counted(self, node: Node) -> Node:
        num_counts = 0
        while self._written in COUNTS or self._kind == "count":
            if (num_counts := num_counts + 1) > MAX_LEVELS:
                raise self._fault(
                    self._at, f"more than {MAX_LEVELS} counts stand one after the other"
                )

            least, most = COUNTS.get(self._written) or _numbers(self._written)
            if most is not None and most < least:
                raise self._fault(self._at, f"{self._written} counts backwards")

            self._go_on()
            node = Joined(()) if most == 0 else Repeat(node, least, most)

        return node

    def _ranges(self, text: str, at: int) -> Ranges:
        """The ranges of a class, whose brackets are away."""
        is_negated = text.startswith("^")
        ranges = []
        for found in RANGE.finditer(text, int(is_negated)):
            low = high = self._code(found[1], at + found.start())
            if found[2] is not None:
                high = self._code(found[2], at + found.start(2))

            if high < low:
                raise self._fault(at + found.start(2), "the range goes backwards")

            ranges.append((low, high))

        chars = joined(ranges)
        if not (chars := without_surrogates(negated(chars) if is_negated else chars)):
            raise self._fault(at, "no character is in the class")

        return chars

    def _code(self, written: str, at: int) -> int:
        """The number of a character."""
        letter = written[-1]
        if len(written) == 1:
            code = ord(letter)
        elif len(written) > 2:
            code = int(written[2:], 16)
        elif letter in ESCAPED or not letter.isalnum():
            code = ord(ESCAPED.get(letter, letter))
        else:
            raise self._fault(at, f"{written} is not known")

        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._fault(at, f"{written} is no character")

        return code

    def _fault(self, at: int, reason: str) -> ValueError:
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        return ValueError(f"line {line}, column {column}: {reason}")


def _numbers(count: str) -> tuple[int, int | None]:
    least, has_most, most = count[1:-1].replace(" ", "").partition(",")
    return int(least), (None if most in ("", "-1") else int(most)) if has_most else int(least)


def joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Ranges in their order, none of which touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))

    return tuple(found)


def negated(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in pairs if before + 1 < after)


def without_surrogates(ranges: Ranges) -> Ranges:
    """They are no characters."""
    first, last = SURROGATES
    parts = [((low, min(high, first - 1)), (max(low, last + 1), high)) for low, high in ranges]
    return tuple((low, high) for pair in parts for low, high in pair if low <= high)
