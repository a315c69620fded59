"""The table of options, read from the fields of the settings, and their values: given, counting,
chosen and shown.

The order is: command line, SageMaker's platform variables, serving.properties, OPTION_… and
SERVING_…, the other environment names, defaults. Sources of the names: LMI's serving.properties,
TGI's variables, and AWS's pages of LMI and of its containers.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.config import EngineConfig, ModelConfig, ServerConfig
from lmi.settings.handler import Handler
from lmi.settings.kinds import OF_TYPE, TEXT, Kind, TooLarge, is_true
from lmi.settings.option import Option
from lmi.settings.properties import Properties
from lmi.shared.machine import Machine

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
    "ENABLE_CUDA_GRAPHS": lambda text: str(not is_true(text, True)).lower()
}


def _options(part: str, settings: type) -> Iterator[Option]:
    """Yield the options of a class of settings, then those of its bases, each in the order of its
    fields.
    """
    declared: dict[str, Field[Any]] = vars(settings)["__dataclass_fields__"]
    # Those of a ClassVar fill no field.
    filled = {field.name for field in fields(settings)}
    prefix = "" if part == "server" else "option."
    for base in settings.__mro__:
        for name in vars(base).get("__annotations__", ()):
            declaration = declared[name]
            facts = dict(declaration.metadata)
            if not facts:
                continue

            facts["kind"] = facts["kind"] or _kind_of_type(str(declaration.type))
            facts.setdefault("key", prefix + name.removesuffix("_s"))
            default = {} if declaration.default is MISSING else declaration.default
            path = f"{part}.{name}" if name in filled else ""
            yield Option(default=default, part=part, field=path, declared=(base, name), **facts)


def _kind_of_type(annotation: str) -> Kind:
    type_name = annotation.removeprefix("ClassVar[").removesuffix("]")
    return OF_TYPE.get(type_name) or OF_TYPE[type_name.removesuffix(" | None")]


OPTIONS = (
    *_options("server", ServerConfig),
    *_options("model", ModelConfig),
    *_options("engine", EngineConfig),
)
BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in BY_KEY}


def find(key: str) -> Option | None:
    """Return the option of a key or alias of serving.properties, or None if no field is that
    option.
    """
    return BY_KEY.get(key)


def is_of_server(key: str) -> bool:
    """Return whether an option belongs to the whole server, and not to a model of it."""
    option = find(key)
    return option is not None and option.part == "server"


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
    def said(self) -> str:
        """How messages name it, with its value and source."""
        return f"{self.written}={self.shown} ({self.source})"

    @property
    def place(self) -> str:
        """How messages name it, with its source."""
        return f"{self.written} ({self.source})"

    @property
    def shown(self) -> str:
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


@dataclass(frozen=True, slots=True)
class Picked:
    """The value that counts for one key, and the given values that do not count."""

    value: Any
    given: Given
    shadowed: tuple[Given, ...] = ()


@dataclass(frozen=True, slots=True)
class _Variable:
    """A variable of the environment that gives an option."""

    name: str
    key: str
    layer: int
    order: int = 0


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


@dataclass(slots=True)
class Values:
    """What was given and chosen for each option, what the choices depend on, and what the operator
    should be told.

    The key is that of the row in the table of options, or as written if the option has no row.
    Steps that settle the options in turn write their choices here.
    """

    environ: Mapping[str, str]
    # The folder that is served. None means that none was named.
    folder: Path | None
    cwd: Path
    machine: Machine
    # The engines that are announced, by name.
    handlers: Mapping[str, Handler]
    # The local folder of each remote source, by its text.
    fetched: Mapping[str, Path]
    # Folders of strangers, which secure mode searches as it does those that were fetched.
    untrusted: Collection[Path]
    # Whether the command line names `folder`.
    is_folder_asked: bool = False

    picked: dict[str, Picked] = field(default_factory=dict)
    # The value that was chosen for a key, and the reason.
    chosen: dict[str, tuple[Any, str]] = field(default_factory=dict)
    # Each of these lines stops the start.
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # The warnings about unknown keys, which `warnings` holds too.
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Lines for a reader who looks for the cause of something.
    details: list[str] = field(default_factory=list)
    # The fault of the model, which is reported after every fault of an option.
    unusable: ModelUnusable | None = None

    def __contains__(self, key: str) -> bool:
        return key in self.picked

    def pick(self, givens: list[Given]) -> None:
        """Pick the value that counts for each key that was given. A bad value is a fault and is
        left out.
        """
        by_key: dict[str, list[Given]] = {}
        for candidate in sorted(givens, key=lambda candidate: candidate.rank):
            by_key.setdefault(candidate.key, []).append(candidate)

        for key, candidates in by_key.items():
            self._pick(key, candidates)

    def _pick(self, key: str, candidates: list[Given]) -> None:
        """Pick the first of the candidates, which are sorted by rank, if its rivals agree."""
        first = candidates[0]
        rivals = [candidate for candidate in candidates if candidate.rank == first.rank]
        values = []
        for rival in rivals:
            try:
                values.append(rival.value())
            except ValueError as error:
                self.faults.append(str(error))

        if len(values) < len(rivals):
            return

        if all(value == values[0] for value in values):
            self.picked[key] = Picked(values[0], first, tuple(candidates[1:]))
        else:
            texts = ", ".join(rival.said for rival in rivals)
            self.faults.append(f"{texts}: these mean the same option, allowed is one value")

    def given(self, key: str, otherwise: Any = None) -> Any:
        """Return the value that was given for an option, or `otherwise`."""
        return self.picked[key].value if key in self.picked else otherwise

    def how_given(self, key: str) -> Given:
        """Return the text that counts, and its source. Raises KeyError if the option
        was not given.
        """
        return self.picked[key].given

    def final(self, key: str) -> Any:
        """Return the value of an option: the chosen one, else the given one, else its default."""
        if key in self.chosen:
            value, _ = self.chosen[key]
            return value

        option = find(key)
        return self.given(key, option and option.default)

    def choose(self, key: str, value: Any, reason: str) -> None:
        """Set an option that was not given."""
        if key not in self.picked:
            self.chosen[key] = (value, reason)

    def settle(self, key: str, value: Any, reason: str) -> None:
        """Replace a given word, such as auto or max, by the value that it means on this machine."""
        if self.given(key) != value:
            self.chosen[key] = (value, reason)

    def fields(self, part: str) -> dict[str, Any]:
        """Return the fields of `server`, `model` or `engine` whose values were given or chosen."""
        prefix = f"{part}."
        values: dict[str, Any] = {}
        for row in OPTIONS:
            is_settled = row.key in self.picked or row.key in self.chosen
            if is_settled and row.field.startswith(prefix):
                values[row.field.removeprefix(prefix)] = self.final(row.key)

        return values

    def refuse(self, key: str, allowed: str) -> None:
        """Add a fault: the option's value is not what is `allowed`."""
        if key in self.picked:
            self.faults.append(self.how_given(key).fault(allowed))
        else:
            self.faults.append(f"{key}={self.final(key)} (not given): allowed is {allowed}")

    def warn(self, line: str) -> None:
        self.warnings.append(line)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def stop_at_faults(self) -> None:
        if self.faults:
            raise BadConfiguration("\n".join(self.faults + self.unknown))

        if self.unusable is not None:
            raise self.unusable


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of `lmi config`."""

    option: str
    value: str
    source: str
    # "value (source)" of each value that was given and does not count.
    shadowed: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Values, key: str) -> Self:
        value = written(key, values.final(key))
        winner = values.picked.get(key)
        _, reason = values.chosen.get(key, (None, ""))
        if winner is None:
            return cls(key, value, reason or "default")

        if winner.given.shown == "***":
            value = "***"

        source = ", ".join(filter(None, (winner.given.source, reason)))
        shadowed = tuple(f"{rival.shown} ({rival.source})" for rival in winner.shadowed)
        return cls(key, value, source, shadowed)


def written(key: str, value: Any) -> str:
    """Return an option's value in the form that serving.properties has."""
    if value is None:
        option = find(key)
        return option.kind.unset if option else ""

    if value == {}:
        return ""

    if isinstance(value, bool):
        return str(value).lower()

    if isinstance(value, float):
        return f"{value:g}"

    if isinstance(value, tuple):
        return ";".join(map(str, value))

    return str(value)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
