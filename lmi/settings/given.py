"""The values that were given for options: on the command line, in serving.properties, and in
variables.

The order is: command line, SageMaker's platform variables, serving.properties, OPTION_… and
SERVING_…, the other environment names, defaults. Sources of the names: LMI's serving.properties,
TGI's variables, and AWS's pages of LMI and of its containers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from lmi.errors import shorten
from lmi.settings.kinds import TEXT, TooLarge, is_true
from lmi.settings.properties import Properties
from lmi.settings.table import BY_KEY, OPTIONS, find

COMMAND_LINE, PLATFORM, FILE, ENVIRONMENT, OTHER_NAMES = range(5)
SECRET = re.compile(
    r"token$|secret|password|credential|api_?key|access_?key|^option\.env$", re.IGNORECASE
)
# The key that a variable means. TRANSLATED converts values of another form.
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
TRANSLATED: dict[str, Callable[[str], str]] = {
    "ENABLE_CUDA_GRAPHS": lambda text: str(not is_true(text, True)).lower(),
    # Nothing is given where processes are restarted as always.
    "PROCESS_AUTO_RECOVERY": lambda text: "" if is_true(text, True) else "0",
}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in BY_KEY}


@dataclass(frozen=True, slots=True)
class Given:
    """One value that was given for an option. The one with the lowest `rank` counts; equal ranks
    must agree.
    """

    # The key of its row in the table of options, or as written if it has no row.
    key: str
    # The key or name as it was written.
    written: str
    text: str
    # Where it was given: file:line, the name of a variable, or a flag.
    source: str
    # The layer, and the order inside the layer.
    rank: tuple[int, int]

    @classmethod
    def of(cls, name: str, text: str, source: str, layer: int, order: int = 0) -> Self:
        option = find(name)
        key = option.key if option else name
        return cls(key, _printable(name)[:100], text.strip(), source, (layer, order))

    @property
    def is_from_file(self) -> bool:
        """Whether serving.properties gives it, which may come with the model."""
        return self.rank[0] == FILE

    @property
    def said(self) -> str:
        """How messages name it, with its value and source."""
        return f"{self.written}={self.shown} ({self.source})"

    @property
    def place(self) -> str:
        """How messages name it, with its source."""
        return f"{self.written} ({self.source})"

    @property
    def shown(self) -> str:
        """Its text for people, *** in the place of a secret."""
        return "***" if SECRET.search(self.key) else _printable(self.text)

    def fault(self, allowed: str) -> str:
        """Return the line about a bad value: key, value, source, allowed values."""
        text = "***" if self.shown == "***" else shorten(self.text)
        return f"{self.written}={text} ({self.source}): allowed is {allowed}"

    def value(self) -> Any:
        """Parse the text. Raises ValueError with the line about a bad one."""
        option = find(self.key)
        kind = option.own_kinds.get(self.source, option.kind) if option else TEXT
        try:
            # This raises for a lone surrogate, as a byte that is not UTF-8 becomes.
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
    """Return all values that were given, in no order. `flags` are texts by key, `files` the file of
    a flag, by key.
    """
    givens: list[Given] = []
    for key, text in flags.items():
        option = find(key)
        flag = f"--set {key}"
        if option and option.key == key and option.has_flag:
            flag = option.flag

        givens.append(Given.of(key, text, files.get(key, flag), COMMAND_LINE))

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


@dataclass(frozen=True, slots=True)
class _Variable:
    """A variable of the environment that gives an option."""

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
    """Return the key that OPTION_X_Y or SERVING_X_Y means.

    SERVING_MIN_WORKERS means minWorkers. The name of an unknown key becomes lower case, if it is
    all upper case.
    """
    prefix, _, suffix = name.partition("_")
    key = _BY_ENV_NAME.get(suffix.replace("_", "").lower())
    if key is not None:
        return key

    lowered = suffix.lower() if suffix.isupper() else suffix
    return f"option.{lowered}" if prefix == "OPTION" else lowered


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
