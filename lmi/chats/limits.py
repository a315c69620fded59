"""Limits of time and memory for one rendering of a chat template.

Nothing that a template does may take long or much memory at once, since it holds the interpreter's
lock. So before a text, a list or a number is made, the size that it can have is spent from a
`Budget`, and each container's size with all that it refers to is bounded, because writing or
comparing one walks through all of it. How deep containers lie in each other is bounded too: Python
hashes a tuple in a tuple in C, where no limit of recursion saves the stack.

minijinja with its `fuel` does not replace this (measured with the Python package 3.1.0). Fuel
counts instructions, not what one of them makes: lists that hold each other twice run without end,
with the interpreter's lock held, and lists that lie 90,000 deep, or a namespace that holds itself,
end the process. A template may also change the client's messages
(`messages.append`). And what it writes differs: floats (`1e20`), `%` on texts, `rsplit`,
`partition`, `removeprefix`, `varargs`, `cycler`, a property of the name `items`.
tests/chats/test_families.py has the right text of each, and the constructs of 44 published
families, of which five differ by a float.
"""

import operator
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from types import MappingProxyType
from typing import Any, NamedTuple

from lmi.errors import GenerationFailed

# An element counts so much in a container's size, where a character counts 1.
NODE_UNITS = 256
# What Python takes for an element of a list, for a text without its characters, and for a character
# that is not ASCII, at most.
BYTES_OF_ELEMENT = 8
BYTES_SPENDING = 64
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
# The most work of one search, which is the product of two lengths.
MAX_WORK = 100_000_000
VIEWS: tuple[type[Any], ...] = type({}.keys()), type({}.values()), type({}.items())
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, *VIEWS, MappingProxyType)
# A function that spends what a call of a method takes at most.
Method = Callable[["Budget", Any, tuple[Any, ...]], None]


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
    """What is left for one rendering: units of memory, about a byte each, and time."""

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
            self.spend(num_units(value))
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
        self.spend(sum(map(num_units, texts)) + num_units(separator) * len(texts))
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
            self.check_format(first, second)

        return None

    def _sum(self, first: Any, second: Any) -> Any:
        """Return the sum of two lists or tuples. Of texts only spend what the sum takes."""
        if isinstance(first, str):
            self.spend(num_units(first))
            if isinstance(second, str):
                self.spend(num_units(second))

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
            self.spend(count * num_units(value))
            return value * count

        self.spend(count * BYTES_OF_ELEMENT * len(value))
        total = value * count
        extent = self.extent(value)
        self._note(total, Extent(NODE_UNITS + count * extent.num_units, extent.depth))
        return total

    def check_format(self, form: str, values: object) -> None:
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
        self.spend(BYTES_OF_CHAR * num_units(form) + num_fields * max_field_chars)

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


def check_search(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    """Raise GenerationFailed for a search that may look at each character of `text` for each one of
    the arguments.
    """
    for part in args:
        if isinstance(part, str) and len(text) * len(part) > MAX_WORK:
            raise GenerationFailed(
                "the chat template searches a long text for a long text from its end"
            )


def _spend_split(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    check_search(budget, text, args)
    separator = next((part for part in args if isinstance(part, str)), "")
    if separator:
        budget.spend(BYTES_SPENDING * text.count(separator))
    else:
        budget.spend(BYTES_OF_CHAR * len(text))


def _spend_padding(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    width = args[0] if args and isinstance(args[0], int) else 0
    budget.spend(BYTES_OF_CHAR * width)


def _spend_tabs(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    width = args[0] if args else 8
    check_count(width)
    if not isinstance(width, int):
        width = 8

    budget.spend(text.count("\t") * width)


def spend_replacement(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    """Spend what the text takes in which a part is replaced. `args` are the part, the new one, and
    perhaps how often.
    """
    if len(args) < 2 or not all(isinstance(value, str) for value in args[:2]):
        return

    old = args[0]
    new = args[1]
    count = text.count(old)
    if len(args) > 2 and isinstance(args[2], int) and args[2] >= 0:
        count = min(count, args[2])

    budget.spend(num_units(text) + count * num_units(new))


# These methods make nothing.
ASKING = frozenset(
    (
        "count",
        "endswith",
        "find",
        "get",
        "index",
        "items",
        "keys",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "rfind",
        "rindex",
        "startswith",
        "values",
    )
)
# These make a text, or texts, about as long as the one that they have.
SAME_LENGTH = (
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
# What a call of these takes is spent before.
SPENDING: Mapping[str, Method] = {
    "strip": check_search,
    "lstrip": check_search,
    "rstrip": check_search,
    "rfind": check_search,
    "rindex": check_search,
    "rpartition": check_search,
    "split": _spend_split,
    "rsplit": _spend_split,
    "center": _spend_padding,
    "ljust": _spend_padding,
    "rjust": _spend_padding,
    "zfill": _spend_padding,
    "expandtabs": _spend_tabs,
    "replace": spend_replacement,
}
# All methods that a template may call. One that is not in SPENDING makes nothing much larger than
# its owner, and what it makes is measured afterwards.
METHODS: Mapping[type, Collection[str]] = {
    str: {*ASKING, *SAME_LENGTH, *SPENDING},
    dict: ("get", "items", "keys", "values", "copy"),
    list: ("index", "count", "copy"),
    tuple: ("index", "count"),
}


def check_method(budget: Budget, owner: object, name: str, args: tuple[Any, ...]) -> None:
    """Spend what the call of a built-in method takes. Raises GenerationFailed for one that
    templates do not have.
    """
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), object)
    if name not in METHODS.get(kind, ()):
        raise GenerationFailed(
            f"the chat template calls {type(owner).__name__}.{name}, which templates cannot call "
            f"here"
        )

    if kind is str and name in SPENDING:
        SPENDING[name](budget, owner, args)
