"""Limits of time and memory for one rendering of a chat template.

Nothing that a template does may take long or much memory at once, since it holds the interpreter's
lock. So before a text, a list or a number is made, the size that it can have is spent from a
`Budget`, and each container's size with all that it refers to is bounded, because writing or
comparing one walks through all of it. How deep containers lie in each other is bounded too: Python
hashes a tuple in a tuple in C, where no limit of recursion saves the stack.

Why minijinja with its `fuel` does not replace this: tests/chats/test_families.py.
"""

import operator
import re
import time
from collections.abc import Iterable, Sized
from types import MappingProxyType
from typing import Any, NamedTuple

from lmi.errors import GenerationFailed

# An element counts so much in a container's size, where a character counts 1.
NODE_UNITS = 256
# What Python takes for an element of a list, and for a character that is not ASCII, at most.
BYTES_OF_ELEMENT = 8
BYTES_OF_CHAR = 4
# Containers may lie in each other so deep.
MAX_DEPTH = 200
# The size of all that a filter may sort or compare.
MAX_HEAVY_UNITS = 4 << 20
# The bits of an integer that is computed with.
MAX_BITS = 4096
# The characters of such an integer, or of a float.
MAX_NUMBER_CHARS = 1300
# The largest number of a filter, as of a `range`.
MAX_COUNT = 100_000
# The characters of an attribute that a filter reads.
MAX_NAME_CHARS = 256
VIEWS: tuple[type[Any], ...] = type({}.keys()), type({}.values()), type({}.items())
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, *VIEWS, MappingProxyType)


class OutOfRoom(GenerationFailed):
    """The rendering would need more memory than it may."""


class Extent(NamedTuple):
    """The size of a value and of all that it refers to, each as often as it is referred to, and how
    deep its containers are nested.

    A text and a number have the depth 0, a list of them 1.
    """

    num_units: int
    depth: int


LEAF = Extent(NODE_UNITS, 0)


class Budget:
    """What is left for one rendering: units of memory, a byte each, and time.

    Messages to people call a unit a character.
    """

    def __init__(self, max_s: float, max_units: int) -> None:
        self._max_s = max_s
        self._max_units = max_units
        self._end_s = time.monotonic() + max_s
        self._num_left = max_units
        # The extents of containers by their ids. Each container is kept, so that no other one gets
        # its id.
        self._extents: dict[int, tuple[object, Extent]] = {}

    def check_time(self) -> None:
        if time.monotonic() > self._end_s:
            raise GenerationFailed(f"the chat template ran for over {self._max_s:g} s")

    def spend(self, units: int) -> None:
        """Raise OutOfRoom if no room for so many units is left.

        A negative number, as the width of a text that is padded may be, spends nothing: what is
        left never grows.
        """
        self._num_left -= max(0, units)
        if self._num_left < 0:
            raise OutOfRoom(f"the chat template made over {self._max_units} characters")

    def size(self, value: Any) -> int:
        """Return the size of a value with all that it refers to, as often as it does.

        Raises OutOfRoom for one that is too large or too deep.
        """
        return self.extent(value).num_units

    def extent(self, value: Any) -> Extent:
        """Return the extent of a value. Raises OutOfRoom for one that is too large or too deep."""
        if isinstance(value, str):
            return Extent(NODE_UNITS + len(value), 0)

        if not isinstance(value, CONTAINERS):
            return LEAF

        noted = self._extents.get(id(value))
        if noted is not None:
            return noted[1]

        parts = value
        if isinstance(value, dict | MappingProxyType):
            parts = [*value, *value.values()]

        num_units = NODE_UNITS
        depth = 0
        for part in parts:
            part_extent = self.extent(part)
            num_units += part_extent.num_units
            depth = max(depth, part_extent.depth)

        extent = Extent(num_units, depth + 1)
        self._note(value, extent)
        return extent

    def _note(self, value: object, extent: Extent) -> None:
        if extent.num_units > self._max_units:
            raise OutOfRoom(f"the chat template made a list with over {self._max_units} characters")

        if extent.depth > MAX_DEPTH:
            raise OutOfRoom(
                f"the chat template made a list with over {MAX_DEPTH} lists in each other"
            )

        self._extents[id(value)] = value, extent

    def made(self, value: Any) -> Any:
        """Return a value that was just made from others, after spending what it takes."""
        self.check_time()
        if isinstance(value, str):
            self.spend(bytes_of(value))
        elif isinstance(value, CONTAINERS):
            self.spend(BYTES_OF_ELEMENT * len(value))
            self.size(value)

        return value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """Return the values as a list, after spending what it takes."""
        if isinstance(values, Sized):
            self.spend(BYTES_OF_ELEMENT * len(values))
            return list(values)

        elements = []
        for value in values:
            self.check_time()
            self.spend(BYTES_OF_ELEMENT)
            elements.append(value)

        return elements

    def joined(self, values: Iterable[Any], separator: str) -> list[Any]:
        """Return the values of a text to join as a list, after spending what the text takes."""
        texts = [text_of(value) for value in self.listed(values)]
        self.spend(sum(map(bytes_of, texts)) + bytes_of(separator) * len(texts))
        return texts

    def operate(self, sign: str, first: Any, second: Any) -> Any:
        """Spend what a binary operation takes.

        Returns its result if it is a list, a tuple or a repeated text, whose extent follows from
        those of the operands. Returns None for any other operation, which the caller makes itself.
        """
        if isinstance(first, int) and isinstance(second, int):
            _check_bits(sign, first, second)
        elif sign == "+":
            return self._sum(first, second)
        elif sign == "*" and isinstance(first, str | list | tuple) and isinstance(second, int):
            return self._repetition(first, second)
        elif sign == "*" and isinstance(second, str | list | tuple) and isinstance(first, int):
            return self._repetition(second, first)
        elif sign == "%" and isinstance(first, str):
            self.spend_format(first, second)

        return None

    def _sum(self, first: Any, second: Any) -> Any:
        """Return the sum of two lists or tuples. Of texts only spend what the sum takes."""
        if isinstance(first, str):
            self.spend(bytes_of(first))
            if isinstance(second, str):
                self.spend(bytes_of(second))

            return None

        if not isinstance(first, list | tuple) or type(first) is not type(second):
            return None

        self.spend(BYTES_OF_ELEMENT * (len(first) + len(second)))
        total: Any = operator.add(first, second)
        first_extent = self.extent(first)
        second_extent = self.extent(second)
        depth = max(first_extent.depth, second_extent.depth)
        self._note(total, Extent(first_extent.num_units + second_extent.num_units, depth))
        return total

    def _repetition(self, value: Any, count: int) -> Any:
        """Return a text, a list or a tuple repeated `count` times."""
        count = max(0, count)
        if isinstance(value, str):
            self.spend(count * bytes_of(value))
            return value * count

        self.spend(count * BYTES_OF_ELEMENT * len(value))
        total = value * count
        extent = self.extent(value)
        self._note(total, Extent(NODE_UNITS + count * extent.num_units, extent.depth))
        return total

    def spend_format(self, form: str, values: object) -> None:
        """Spend what a text that `%` writes takes at most: each field has its width, and may write
        every value.
        """
        widths = [0]
        for digits in re.findall(r"\d+", form):
            widths.append(int(digits[:12]))

        if "*" in form and isinstance(values, tuple):
            widths += [abs(value) for value in values if isinstance(value, int)]

        max_value_chars = 8 * (self.size(values) - NODE_UNITS)
        max_field_chars = MAX_NUMBER_CHARS + max(widths) + max_value_chars
        num_fields = form.count("%")
        self.spend(BYTES_OF_CHAR * bytes_of(form) + num_fields * max_field_chars)

    def check_heavy(self, values: Iterable[object]) -> None:
        """Raise OutOfRoom for values that are too many or too large to be sorted or compared with
        each other.
        """
        if sum(map(self.size, values)) > MAX_HEAVY_UNITS:
            raise OutOfRoom(
                f"the chat template sorts or compares over {MAX_HEAVY_UNITS} characters"
            )


def bytes_of(text: str) -> int:
    """Return the bytes of a text in memory, at most."""
    return len(text) if text.isascii() else BYTES_OF_CHAR * len(text)


def text_of(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _check_bits(sign: str, first: int, second: int) -> None:
    """Raise GenerationFailed if the result of an operation may have too many bits."""
    max_bits = 2 * MAX_BITS
    num_bits = first.bit_length() + second.bit_length()
    if sign == "**":
        max_bits = MAX_BITS
        num_bits = first.bit_length() * max(0, second)

    if num_bits > max_bits:
        raise GenerationFailed(f"the chat template computes with numbers of over {MAX_BITS} bits")


def check_count(value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise GenerationFailed(
            f"the chat template gives a filter or a method a number over {MAX_COUNT}"
        )


def check_names(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, str) and len(value) > MAX_NAME_CHARS:
            raise GenerationFailed(
                f"the chat template gives a filter a name of over {MAX_NAME_CHARS} characters"
            )
