"""Patterns of names in an adapter's configuration, which a stranger may have written.

Some patterns would keep Python's `re` busy for ever, so any that is more than a name is followed in all its ways at
once: for each part of it, from the places of the name where the part may begin to those where it may end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_CHARS = 1000  # of a pattern that is more than a name
MAX_PATTERNS = 16  # of an adapter
MAX_VISITS = 4000  # of places, for one name

_PLAIN = re.compile(r"(\^|\.\*\\\.)?((?:[\w-]|\\?\.)+)\$?")
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdigit,
    codes.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdigit(),
    codes.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    codes.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}


class PatternRefused(Exception):
    """A pattern that is not followed. The text says why."""


def check(patterns: Iterable[str]) -> None:
    """Raise PatternRefused unless these patterns of one adapter can be followed."""
    others = [pattern for pattern in patterns if not is_plain(pattern)]
    if len(others) > MAX_PATTERNS:
        raise PatternRefused(f"{len(others)} patterns are more than names, and at most {MAX_PATTERNS} may be")
    for pattern in others:
        _parsed(pattern)


def is_plain(pattern: str) -> bool:
    """Whether a pattern is a name or the end of one, perhaps with the signs that say so."""
    return len(pattern) <= MAX_CHARS and _PLAIN.fullmatch(pattern) is not None


def is_whole(pattern: str, name: str) -> bool:
    """Whether a pattern fits a whole name."""
    return _fits(pattern, name, {0})


def is_end(pattern: str, name: str) -> bool:
    """Whether a pattern fits a name, or what is behind one of its dots."""
    if (plain := _PLAIN.fullmatch(pattern)) is None or not is_plain(pattern):
        return _fits(pattern, name, {0} | {place + 1 for place, letter in enumerate(name) if letter == "."})
    end = plain[2].replace("\\", "")
    return (
        name.endswith(f".{end}") if plain[1] == r".*\." else name == end or (not plain[1] and name.endswith(f".{end}"))
    )


def _fits(pattern: str, name: str, starts: set[int]) -> bool:
    return len(name) in _Walk(pattern, name).after(_parsed(pattern), starts)


@lru_cache(maxsize=256)
def _parsed(pattern: str) -> Any:
    if len(pattern) > MAX_CHARS:
        raise PatternRefused(f"a pattern of names has {len(pattern)} characters, over {MAX_CHARS}")
    try:
        return parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternRefused(f"a pattern of names is not a regular expression: {error}") from None


class _Walk:
    """One pattern along one name. Raises PatternRefused for a part that is not followed, and after too many visits."""

    def __init__(self, pattern: str, name: str) -> None:
        self._pattern, self._name = pattern, name
        self._num_visits = 0

    def after(self, parts: Any, starts: set[int]) -> set[int]:
        """The places where all parts, one behind the other, may end."""
        for code, value in parts:
            if not starts:
                return starts
            self._num_visits += len(starts)
            if self._num_visits > MAX_VISITS:
                raise PatternRefused(f"the pattern {self._pattern!r} takes too long to compare with names")
            starts = self._step(code, value, starts)
        return starts

    def _step(self, code: Any, value: Any, starts: set[int]) -> set[int]:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, repeated = value
            return self._repeated(least, most, repeated, starts)
        if code is codes.SUBPATTERN and not (value[1] or value[2]):  # without flags of its own
            return self.after(value[3], starts)
        if code is codes.BRANCH:
            return set[int]().union(*(self.after(branch, starts) for branch in value[1]))
        if code in (codes.ASSERT, codes.ASSERT_NOT) and value[0] == 1:  # which look ahead
            return {one for one in starts if bool(self.after(value[1], {one})) is (code is codes.ASSERT)}
        if code is codes.AT:
            return {one for one in starts if self._is_at(value, one)}
        return {one + 1 for one in starts if one < len(self._name) and self._is_letter(code, value, self._name[one])}

    def _repeated(self, least: int, most: int, parts: Any, starts: set[int]) -> set[int]:
        """More repeats than the name has letters lead nowhere new."""
        bound = len(self._name) + 1
        for _ in range(min(least, bound)):
            starts = self.after(parts, starts)
        found, new = set(starts), starts
        for _ in range(min(most - least, bound)):
            new = self.after(parts, new) - found
            if not new:
                break
            found |= new
        return found

    def _is_at(self, where: Any, place: int) -> bool:
        if where in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return place == 0
        if where in (codes.AT_END, codes.AT_END_STRING):
            return place == len(self._name)
        if where is codes.AT_BOUNDARY:
            is_word = [bool(re.match(r"\w", letter)) for letter in (self._name[place - 1 : place], self._name[place:])]
            return is_word[0] is not is_word[1]
        raise self._refused()

    def _is_letter(self, code: Any, value: Any, letter: str) -> bool:
        if code is codes.ANY:
            return True
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            return (ord(letter) == value) is (code is codes.LITERAL)
        if code is codes.RANGE:
            return bool(value[0] <= ord(letter) <= value[1])
        if code is codes.CATEGORY and value in _CATEGORIES:
            return _CATEGORIES[value](letter)
        if code is codes.IN:
            is_not = value[0][0] is codes.NEGATE
            return any(self._is_letter(kind, one, letter) for kind, one in value[is_not:]) is not is_not
        raise self._refused()

    def _refused(self) -> PatternRefused:
        return PatternRefused(f"the pattern {self._pattern!r} has a part that is not followed; list the names instead")
