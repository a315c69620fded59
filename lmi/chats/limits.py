"""Limits of time and memory for one rendering of a chat template.

Nothing that a template does may take long or much memory at once, since it holds the interpreter's
lock. So before a text, a list or a number is made, the size that it can have is spent from a
`Budget`, and each container's size with all that it refers to is bounded, because writing or
comparing one walks through all of it. How deep containers lie in each other is bounded too: Python
hashes a tuple in a tuple in C, where no limit of recursion saves the stack.
"""

import operator
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from types import MappingProxyType
from typing import Any, NamedTuple

from lmi.errors import GenerationFailed

NODE_UNITS = 256  # what an element counts in a container's size, in which a character counts 1
MAX_DEPTH = 200  # of containers in a container
MAX_HEAVY_UNITS = 4 << 20  # of all that a filter may sort or compare
MAX_BITS = 4096  # of an integer that is computed with
MAX_NUMBER_CHARS = 1300  # of such an integer, or of a float
MAX_COUNT = 100_000  # of a filter's numbers, as of a `range`
MAX_NAME_CHARS = 256  # of an attribute that a filter reads
MAX_WORK = 100_000_000  # of a search whose work is the product of two lengths
VIEWS: tuple[type[Any], ...] = type({}.keys()), type({}.values()), type({}.items())
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, *VIEWS, MappingProxyType)
Method = Callable[
    ["Budget", Any, tuple[Any, ...]], None
]  # spends what the call of a method takes at most


class OutOfRoom(GenerationFailed):
    """The rendering would need more memory than it may."""


class Extent(NamedTuple):
    """How large a value is with all that it refers to, as often as it does, and how many containers
    lie in each other.

    A text and a number have the depth 0, a list of them 1.
    """

    num_units: int
    depth: int


LEAF = Extent(NODE_UNITS, 0)


class Budget:
    """What is left for one rendering: units of memory, about a byte each, and time."""

    def __init__(self, max_s: float, max_units: int) -> None:
        self._max_s = max_s
        self._max_units = max_units
        self._end_s = time.monotonic() + max_s
        self._num_left = max_units
        # Of containers by their ids. Each container is kept, so that its id stays its own.
        self._extents: dict[int, tuple[object, Extent]] = {}

    def check_time(self) -> None:
        if time.monotonic() > self._end_s:
            raise GenerationFailed(f"the chat template ran for over {self._max_s:g} s")

    def spend(self, units: int) -> None:
        """Raise OutOfRoom if no room for so many units is left."""
        self._num_left -= units
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

        known = self._extents.get(id(value))
        if known is not None:
            return known[1]

        num_units = NODE_UNITS
        depth = 0
        parts = [*value, *value.values()] if isinstance(value, dict | MappingProxyType) else value
        for part in parts:
            of_part = self.extent(part)
            num_units += of_part.num_units
            depth = max(depth, of_part.depth)

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
            self.spend(num_units(value))
        elif isinstance(value, CONTAINERS):
            self.spend(8 * len(value))
            self.size(value)

        return value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        if isinstance(values, Sized):
            self.spend(8 * len(values))
            return list(values)

        found = []
        for value in values:
            self.check_time()
            self.spend(8)
            found.append(value)

        return found

    def joined(self, values: Iterable[Any], separator: str) -> list[Any]:
        """Return the values of a text to join as a list, after spending what the text takes."""
        values = self.listed(values)
        texts = [value if isinstance(value, str) else str(value) for value in values]
        self.spend(sum(map(num_units, texts)) + num_units(separator) * len(texts))
        return texts

    def operate(self, sign: str, left: Any, right: Any) -> Any:
        """Check and spend what a binary operation takes. Returns its result where that was made for
        it.
        """
        if isinstance(left, int) and isinstance(right, int):
            num_bits = (
                left.bit_length() * max(0, right)
                if sign == "**"
                else left.bit_length() + right.bit_length()
            )
            if num_bits > (MAX_BITS if sign == "**" else 2 * MAX_BITS):
                raise GenerationFailed(
                    f"the chat template computes with numbers of over {MAX_BITS} bits"
                )
        elif sign == "+" and isinstance(left, str):
            self.spend(num_units(left) + (num_units(right) if isinstance(right, str) else 0))
        elif sign == "+" and isinstance(left, list | tuple) and type(left) is type(right):
            self.spend(8 * (len(left) + len(right)))
            total: Any = operator.add(left, right)
            of_left = self.extent(left)
            of_right = self.extent(right)
            depth = max(of_left.depth, of_right.depth)
            self._note(total, Extent(of_left.num_units + of_right.num_units, depth))
            return total
        elif sign == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            return self._repeated(left, right)
        elif sign == "*" and isinstance(right, str | list | tuple) and isinstance(left, int):
            return self._repeated(right, left)
        elif sign == "%" and isinstance(left, str):
            self.check_format(left, right)

        return None

    def _repeated(self, value: Any, count: int) -> Any:
        count = max(0, count)
        self.spend(count * (num_units(value) if isinstance(value, str) else 8 * len(value)))
        if isinstance(value, str):
            return value * count

        total = value * count
        of_value = self.extent(value)
        self._note(total, Extent(NODE_UNITS + count * of_value.num_units, of_value.depth))
        return total

    def check_format(self, form: str, values: object) -> None:
        """Spend what a text that `%` writes takes at most: each field has its width, and may write
        every value.
        """
        widths = [int(digits[:12]) for digits in re.findall(r"\d+", form)]
        if "*" in form and isinstance(values, tuple):
            widths += [abs(value) for value in values if isinstance(value, int)]

        one = MAX_NUMBER_CHARS + max(widths, default=0) + 8 * (self.size(values) - NODE_UNITS)
        self.spend(4 * num_units(form) + form.count("%") * one)

    def check_heavy(self, values: Iterable[object]) -> None:
        """Raise OutOfRoom for values that are too many or too large to be sorted or compared with
        each other.
        """
        if sum(map(self.size, values)) > MAX_HEAVY_UNITS:
            raise OutOfRoom(
                f"the chat template sorts or compares over {MAX_HEAVY_UNITS} characters"
            )


def num_units(text: str) -> int:
    """Return the bytes of a text in memory, at most."""
    return len(text) if text.isascii() else 4 * len(text)


def check_count(value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise GenerationFailed(
            f"the chat template gives a filter or a method a number over {MAX_COUNT}"
        )


def check_names(values: Iterable[object]) -> None:
    if any(isinstance(value, str) and len(value) > MAX_NAME_CHARS for value in values):
        raise GenerationFailed(
            f"the chat template gives a filter a name of over {MAX_NAME_CHARS} characters"
        )


def searched(budget: Budget, text: str, given: tuple[Any, ...]) -> None:
    """Raise GenerationFailed for a search that may look at each character of `text` for each one of
    what is given.
    """
    if any(isinstance(part, str) and len(text) * len(part) > MAX_WORK for part in given):
        raise GenerationFailed(
            "the chat template searches a long text for a long text from its end"
        )


def _split(budget: Budget, text: str, given: tuple[Any, ...]) -> None:
    searched(budget, text, given)
    separator = next((part for part in given if isinstance(part, str)), "")
    budget.spend(64 * text.count(separator) if separator else 4 * len(text))


def _pad(budget: Budget, text: str, given: tuple[Any, ...]) -> None:
    budget.spend(4 * given[0] if given and isinstance(given[0], int) else 0)


def _expand(budget: Budget, text: str, given: tuple[Any, ...]) -> None:
    check_count(given[0] if given else 8)
    budget.spend(text.count("\t") * (given[0] if given and isinstance(given[0], int) else 8))


def replaced(budget: Budget, text: str, given: tuple[Any, ...]) -> None:
    if len(given) >= 2 and isinstance(given[0], str) and isinstance(given[1], str):
        count = text.count(given[0])
        limit = (
            given[2] if len(given) > 2 and isinstance(given[2], int) and given[2] >= 0 else count
        )
        budget.spend(num_units(text) + min(count, limit) * num_units(given[1]))


ASKING = frozenset(  # methods that make nothing
    "count endswith find get index items keys isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric "
    "isprintable isspace istitle isupper rfind rindex startswith values".split()
)
SHORTENING = (
    "capitalize",
    "casefold",
    "lower",
    "partition",
    "removeprefix",
    "removesuffix",
    "splitlines",
    "swapcase",
    "title",
    "upper",
)
OF_TEXT: Mapping[str, Method] = {
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), searched),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
    "expandtabs": _expand,
    "replace": replaced,
}
METHODS: Mapping[
    type, Collection[str]
] = {  # whose results are no larger than what is there, or measured when there
    str: {*ASKING, *SHORTENING, *OF_TEXT},
    dict: ("get", "items", "keys", "values", "copy"),
    list: ("index", "count", "copy"),
    tuple: ("index", "count"),
}


def check_method(budget: Budget, owner: object, name: str, given: tuple[Any, ...]) -> None:
    """Spend what the call of a built-in method takes. Raises GenerationFailed for one that
    templates do not have.
    """
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), object)
    if name not in METHODS.get(kind, ()):
        raise GenerationFailed(
            f"the chat template calls {type(owner).__name__}.{name}, which templates cannot call "
            f"here"
        )

    if kind is str and name in OF_TEXT:
        OF_TEXT[name](budget, owner, given)
