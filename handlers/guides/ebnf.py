"""Reads a grammar in EBNF, as llama.cpp (GBNF) and xgrammar write it. What it does not know is
refused with its place.

root ::= "a" [0-9]{1,3} (word | "\\n")*   # a rule goes up to the next one's name
word ::= [^a-z\\]]+ .                     # . is any character
"""

from __future__ import annotations

import re
from typing import NamedTuple

from handlers.guides.char_ranges import (
    LAST,
    SURROGATES,
    Ranges,
    joined,
    negated,
    without_surrogates,
)
from handlers.guides.grammar import Chars, Either, Joined, Node, Ref, Repeat
from handlers.guides.places import place_in

MAX_NODES = 50_000
MAX_LEVELS = 100
# Letters of a count such as {1,3}, with its white space
MAX_COUNT_LENGTH = 200
TOKEN = re.compile(
    r"""
      (?P<space>(?:\s|\#[^\n]*)+)
    | (?P<name>[A-Za-z_][\w.-]*)
    | (?P<define>::=)
    | (?P<text>"(?:\\.|[^"\\\n])*")
    | (?P<chars>\[(?:\\.|[^\]\\\n])*\])
    | (?P<count>\{\s*\d+\s*(?:,\s*(?:-1|\d*)\s*)?\})
    | (?P<mark>[|()*+?.])
    """,
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


class _Token(NamedTuple):
    # The name of its group in TOKEN, or "end".
    kind: str
    text: str
    offset: int


def read_grammar(text: str) -> dict[str, Node]:
    """The rules of a grammar; `root` is among them. Raises ValueError."""
    return _GrammarReader(text).rules()


class _GrammarReader:
    """Reads by recursive descent: a method for each production, which its docstring shows."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[_Token] = []
        # The names of rules, and where each is used first.
        self._used = {"root": 0}
        self._num_nodes = 0
        self._level = 0

        offset = 0
        while offset < len(text):
            match = TOKEN.match(text, offset)
            if match is None:
                raise self._fault(offset, f"{text[offset]} is not known")

            if match.lastgroup != "space":
                self._tokens.append(_Token(str(match.lastgroup), match.group(), offset))

            offset = match.end()

        self._tokens.append(_Token("end", "the end", len(text)))
        self._next = -1
        self._go_on()

    def rules(self) -> dict[str, Node]:
        """rules ::= (name "::=" either)*"""
        rules: dict[str, Node] = {}
        while self._kind != "end":
            name = self._take("name", "rule's name")
            offset = self._offset
            self._take("::=")
            if name in rules:
                raise self._fault(offset, f'rule "{name}" is there twice')

            rules[name] = self._either()

        for name, offset in self._used.items():
            if name not in rules:
                raise self._fault(offset, f'Rule "{name}" is not defined')

        return rules

    def _go_on(self) -> None:
        self._next += 1
        self._kind, self._token, self._offset = self._tokens[self._next]

    def _take(self, kind_or_token: str, title: str = "") -> str:
        """Go on behind a token that is of this kind, or is this one."""
        token = self._token
        if kind_or_token not in (self._kind, token):
            raise self._fault(self._offset, f"{token} where a {title or kind_or_token} must stand")

        self._go_on()
        return token

    def _either(self) -> Node:
        """either ::= joined ("|" joined)*"""
        parts = [self._joined()]
        while self._token == "|":
            self._go_on()
            parts.append(self._joined())

        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _joined(self) -> Node:
        """joined ::= counted*"""
        parts: list[Node] = []
        while self._begins_part():
            parts.append(self._counted())

        return _joined_parts(parts)

    def _begins_part(self) -> bool:
        if self._kind == "name":
            # Else the next rule begins with it. The token "end" is always behind a name.
            return self._tokens[self._next + 1].kind != "define"

        return self._kind in ("text", "chars") or self._token in ("(", ".")

    def _single(self) -> Node:
        """single ::= "(" either ")" | "." | text | chars | name"""
        kind = self._kind
        token = self._token
        offset = self._offset
        self._go_on()

        self._num_nodes += len(token) if kind == "text" else 1
        if self._num_nodes > MAX_NODES:
            raise self._fault(offset, f"the grammar has more than {MAX_NODES} parts")

        if kind == "text":
            return self._text_node(token[1:-1], offset + 1)

        if kind == "chars":
            return Chars(self._ranges(token[1:-1], offset + 1))

        if token == ".":
            return Chars(without_surrogates(((0, LAST),)))

        if kind == "name":
            self._used.setdefault(token, offset)
            return Ref(token)

        self._level += 1
        if self._level > MAX_LEVELS:
            raise self._fault(offset, f"more than {MAX_LEVELS} parentheses stand in each other")

        node = self._either()
        self._take(")")
        self._level -= 1
        return node

    def _text_node(self, text: str, offset: int) -> Node:
        """The characters of a text, whose quotes are away."""
        parts: list[Node] = []
        for match in re.finditer(CHAR, text, re.DOTALL):
            code = self._code(match[0], offset + match.start())
            ranges = ((code, code),)
            parts.append(Chars(ranges))

        return _joined_parts(parts)

    def _counted(self) -> Node:
        """counted ::= single ("*" | "+" | "?" | count)*"""
        node = self._single()
        num_counts = 0
        while self._token in COUNTS or self._kind == "count":
            num_counts += 1
            if num_counts > MAX_LEVELS:
                raise self._fault(
                    self._offset, f"more than {MAX_LEVELS} counts stand one after the other"
                )

            if len(self._token) > MAX_COUNT_LENGTH:
                raise self._fault(self._offset, "a count has too many digits")

            least, most = COUNTS.get(self._token) or _numbers(self._token)
            if most is not None and most < least:
                raise self._fault(self._offset, f"{self._token} counts backwards")

            self._go_on()
            node = Joined(()) if most == 0 else Repeat(node, least, most)

        return node

    def _ranges(self, text: str, offset: int) -> Ranges:
        """The ranges of a class, whose brackets are away."""
        is_negated = text.startswith("^")
        ranges = []
        for match in RANGE.finditer(text, int(is_negated)):
            low = self._code(match[1], offset + match.start())
            high = low
            if match[2] is not None:
                high = self._code(match[2], offset + match.start(2))

            if high < low:
                raise self._fault(offset + match.start(2), "the range goes backwards")

            ranges.append((low, high))

        chars = joined(ranges)
        if is_negated:
            chars = negated(chars)

        chars = without_surrogates(chars)
        if not chars:
            raise self._fault(offset, "no character is in the class")

        return chars

    def _code(self, char: str, offset: int) -> int:
        """The number of a character, which may be escaped."""
        letter = char[-1]
        if len(char) == 1:
            code = ord(letter)
        elif len(char) > 2:
            code = int(char[2:], 16)
        elif letter in ESCAPED or not letter.isalnum():
            code = ord(ESCAPED.get(letter, letter))
        else:
            raise self._fault(offset, f"{char} is not known")

        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._fault(offset, f"{char} is no character")

        return code

    def _fault(self, offset: int, reason: str) -> ValueError:
        return ValueError(f"{place_in(self._text, offset)}: {reason}")


def _joined_parts(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Joined(tuple(parts))


def _numbers(count: str) -> tuple[int, int | None]:
    """The least and the most that a count such as `{1,3}` allows."""
    least, comma, most = count[1:-1].partition(",")
    if not comma:
        return int(least), int(least)

    if most.strip() in ("", "-1"):
        return int(least), None

    return int(least), int(most)
