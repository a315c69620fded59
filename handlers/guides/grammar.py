"""A grammar as it was read: rules by their names, each a tree of these nodes."""

from __future__ import annotations

from typing import NamedTuple

from handlers.guides.char_ranges import Ranges


class Chars(NamedTuple):
    """One character of these ranges."""

    ranges: Ranges


class Ref(NamedTuple):
    """What the rule of this name allows."""

    name: str


class Repeat(NamedTuple):
    """A part, at least and at most so many times. `most` is None without a limit."""

    part: Node
    least: int
    most: int | None


class Joined(NamedTuple):
    """Parts, one behind the other."""

    parts: tuple[Node, ...]


class Either(NamedTuple):
    """One of the parts."""

    parts: tuple[Node, ...]


Node = Chars | Ref | Repeat | Joined | Either
