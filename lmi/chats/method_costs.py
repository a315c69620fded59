"""What a call of a built-in method in a chat template takes, and which methods it may call."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lmi.chats.limits import BYTES_OF_CHAR, Budget, bytes_of, check_count
from lmi.errors import GenerationFailed

# What Python takes for a text without its characters, at most.
BYTES_OF_TEXT = 64
# The most work of one search, which is the product of two lengths.
MAX_WORK = 100_000_000
# A function that spends what a call of a method takes at most.
Method = Callable[[Budget, Any, tuple[Any, ...]], None]


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
        budget.spend(BYTES_OF_TEXT * text.count(separator))
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

    budget.spend(bytes_of(text) + count * bytes_of(new))


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


def spend_method(budget: Budget, owner: object, name: str, args: tuple[Any, ...]) -> None:
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
