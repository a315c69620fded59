"""The values that were given for options: on the command line, in serving.properties, and in
variables.

What counts first is the command line, then the variables of SageMaker and of AWS's images,
serving.properties, OPTION_… and SERVING_…, the other variables, and last the default. Sources of
the names: LMI's serving.properties, TGI's variables, and AWS's pages of LMI and of its containers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from msgspec import Struct

from lmi.errors import shorten
from lmi.settings.kinds import TEXT, TooLarge, is_true
from lmi.settings.properties import Properties
from lmi.settings.table import BY_KEY, OPTIONS, find

# Where values are given. The lowest number counts.
COMMAND_LINE = 0
PLATFORM = 1
FILE = 2
ENVIRONMENT = 3
OTHER_NAMES = 4
# Keys of options whose values are not shown.
SECRET = re.compile(
    r"token$|secret|password|credential|api_?key|access_?key|^option\.env$", re.IGNORECASE
)
# The keys that further variables mean.
OTHER_ENV = {
    "MAX_INPUT_LENGTH": "max_input_length",
    "MAX_INPUT_TOKENS": "max_input_length",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
    "ENABLE_CUDA_GRAPHS": "option.enforce_eager",
    # A Kubernetes LeaderWorkerSet gives these three to each pod.
    "LWS_GROUP_SIZE": "option.nnodes",
    "LWS_WORKER_INDEX": "option.node_rank",
    "LWS_LEADER_ADDRESS": "option.master_addr",
}
# These variables have values of another form.
TRANSLATED: dict[str, Callable[[str], str]] = {
    "ENABLE_CUDA_GRAPHS": lambda text: str(not is_true(text, True)).lower(),
    # Nothing is given where processes are restarted as always.
    "PROCESS_AUTO_RECOVERY": lambda text: "" if is_true(text, True) else "0",
}
# Known keys by their names in variables, without OPTION_ or SERVING_ and other underscores.
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in BY_KEY}


class Rank(NamedTuple):
    """Which of several values for one option counts: the one with the lowest rank."""

    # COMMAND_LINE and so on.
    layer: int
    # The order in the layer.
    order: int = 0


class Given(Struct, frozen=True):
    """One value that was given for an option. Values of the lowest rank must agree."""

    # The key of its row in the table of options, or as it was written if it has no row.
    key: str
    # The key or the variable as it was written.
    name: str
    text: str
    # Where it was given: file:line, the name of a variable, or a flag.
    source: str
    rank: Rank

    @classmethod
    def of(cls, name: str, text: str, source: str, layer: int, order: int = 0) -> Self:
        option = find(name)
        key = option.key if option else name
        return cls(key, _printable(name)[:100], text.strip(), source, Rank(layer, order))

    @property
    def is_from_file(self) -> bool:
        """Whether serving.properties gives it, which may come with the model."""
        return self.rank.layer == FILE

    @property
    def assignment(self) -> str:
        """How messages name it, with its value and source: `option.dtype=fp16 (--dtype)`."""
        return f"{self.name}={self.shown} ({self.source})"

    @property
    def place(self) -> str:
        """How messages name it, with its source: `option.dtype (--dtype)`."""
        return f"{self.name} ({self.source})"

    @property
    def shown(self) -> str:
        """Its text for people, or *** if it is a secret."""
        return "***" if SECRET.search(self.key) else _printable(self.text)

    def fault(self, allowed: str) -> str:
        """Return the line about a bad value, which says what is `allowed`."""
        text = "***" if self.shown == "***" else shorten(self.text)
        return f"{self.name}={text} ({self.source}): allowed is {allowed}"

    def value(self) -> Any:
        """Parse the text. Raises ValueError with the line about a bad one."""
        option = find(self.key)
        kind = TEXT
        if option is not None:
            kind = option.own_kinds.get(self.source, option.kind)

        try:
            # This raises for a byte that is not UTF-8, which has become a lone surrogate.
            (self.key + self.text).encode()
            return kind.parse(self.text)
        except ValueError as error:
            allowed = str(error) if isinstance(error, TooLarge) else kind.allowed
            raise ValueError(self.fault(allowed)) from None


def collect(
    properties: Properties,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    files: Mapping[str, str] = {},
) -> list[Given]:
    """Return all values that were given, in no order. By key, `flags` has the texts of the command
    line, and `files` the files that some of them came from.
    """
    givens: list[Given] = []
    for key, text in flags.items():
        source = files.get(key, _flag_of(key))
        givens.append(Given.of(key, text, source, COMMAND_LINE))

    for key, line in properties.entries.items():
        givens.append(Given.of(key, line.value, properties.source(key), FILE))

    for variable in _variables(environ):
        text = environ.get(variable.name, "").strip()
        if text:
            text = TRANSLATED.get(variable.name, str)(text)
            givens.append(
                Given.of(variable.key, text, variable.name, variable.layer, variable.order)
            )

    return [entry for entry in givens if entry.text]


def _flag_of(key: str) -> str:
    """Return the flag by which the command line gives a key."""
    option = find(key)
    if option is not None and option.key == key and option.has_flag:
        return option.flag

    return f"--set {key}"


class _Variable(Struct, frozen=True):
    """A variable of the environment that gives an option, by its key."""

    name: str
    key: str
    layer: int
    order: int = 0


def _variables(environ: Mapping[str, str]) -> Iterator[_Variable]:
    """Yield the variables that give options, whether they are set or not."""
    for name in sorted(environ):
        if name.startswith(("OPTION_", "SERVING_")):
            yield _Variable(name, key_of_env(name), ENVIRONMENT)

    for option in OPTIONS:
        for order, name in enumerate(option.platform):
            yield _Variable(name, option.key, PLATFORM, order)

        for order, name in enumerate(option.env):
            yield _Variable(name, option.key, OTHER_NAMES, order)

    for name, key in OTHER_ENV.items():
        yield _Variable(name, key, OTHER_NAMES)


def key_of_env(name: str) -> str:
    """Return the key that OPTION_X_Y or SERVING_X_Y means, as SERVING_MIN_WORKERS means minWorkers.

    The key of an unknown option is in lower case, unless the name has both cases.
    """
    prefix, _, suffix = name.partition("_")
    known_key = _BY_ENV_NAME.get(suffix.replace("_", "").lower())
    if known_key is not None:
        return known_key

    key = suffix.lower() if suffix.isupper() else suffix
    if prefix == "OPTION":
        return f"option.{key}"

    return key


def _printable(text: str) -> str:
    """Return a text with escapes for what cannot be printed."""
    if text.isprintable():
        return text

    return ascii(text)[1:-1]
