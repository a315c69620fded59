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
from lmi.settings.kinds import OF_TYPE, TEXT, TooLarge, is_true
from lmi.settings.option import Option
from lmi.settings.properties import Properties
from lmi.shared.linux import Machine

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
    "LWS_GROUP_SIZE": "option.nnodes",  # a Kubernetes LeaderWorkerSet gives these three to each pod
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
    filled = {one.name for one in fields(settings)}  # not those of a ClassVar
    for each in settings.__mro__:
        for name in vars(each).get("__annotations__", ()):
            one = declared[name]
            if facts := dict(one.metadata):
                held = str(one.type).removeprefix("ClassVar[").removesuffix("]")
                facts["kind"] = (
                    facts["kind"] or OF_TYPE.get(held) or OF_TYPE[held.removesuffix(" | None")]
                )
                facts.setdefault(
                    "key", ("" if part == "server" else "option.") + name.removesuffix("_s")
                )
                default = {} if one.default is MISSING else one.default
                field = f"{part}.{name}" if name in filled else ""
                yield Option(
                    default=default, part=part, field=field, declared=(each, name), **facts
                )


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
    prefix, _, rest = name.partition("_")
    known = _BY_ENV_NAME.get(rest.replace("_", "").lower())
    if known is not None:
        return known

    lowered = rest.lower() if rest.isupper() else rest
    return f"option.{lowered}" if prefix == "OPTION" else lowered


@dataclass(frozen=True, slots=True)
class Given:
    """One value that was given for an option. The one with the lowest `rank` counts; equal ranks
    must agree.
    """

    key: str  # the key of its row in the table of options, or as written if it has no row
    written: str  # the key or name as it was written
    text: str
    source: str  # file:line, the name of a variable, a flag
    rank: tuple[int, int]  # layer, order inside the layer

    @classmethod
    def of(cls, written: str, text: str, source: str, layer: int, order: int = 0) -> Self:
        option = find(written)
        return cls(
            option.key if option else written,
            _printable(written)[:100],
            text.strip(),
            source,
            (layer, order),
        )

    @property
    def said(self) -> str:
        """Its name in messages, with its value and source."""
        return f"{self.written}={self.shown} ({self.source})"

    @property
    def place(self) -> str:
        """Its name in messages, with its source."""
        return f"{self.written} ({self.source})"

    @property
    def shown(self) -> str:
        return "***" if SECRET.search(self.key) else _printable(self.text)

    def fault(self, allowed: str) -> str:
        """Return the line about a bad value: key, value, source, allowed values."""
        shown = "***" if self.shown == "***" else shorten(self.text)
        return f"{self.written}={shown} ({self.source}): allowed is {allowed}"

    def value(self) -> Any:
        """Parse the text. Raises ValueError with the line about a bad one."""
        option = find(self.key)
        kind = option.own_kinds.get(self.source, option.kind) if option else TEXT
        try:
            (
                self.key + self.text
            ).encode()  # raises for a lone surrogate, as a byte that is not UTF-8 becomes
            return kind.parse(self.text)
        except ValueError as error:
            raise ValueError(
                self.fault(str(error) if isinstance(error, TooLarge) else kind.allowed)
            ) from None


@dataclass(frozen=True, slots=True)
class Picked:
    """The value that counts for one key, and the given values that do not count."""

    value: Any
    given: Given
    shadowed: tuple[Given, ...] = ()


def collect(
    properties: Properties,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    files: Mapping[str, str] = {},
) -> list[Given]:
    """Return all values that were given, in no order. `flags` are texts by key, `files` the file of
    a flag, by key.
    """
    givens = []
    for key, text in flags.items():
        option = find(key)
        flag = option.flag if option and option.key == key and option.has_flag else f"--set {key}"
        givens.append(Given.of(key, text, files.get(key, flag), COMMAND_LINE))

    givens += [
        Given.of(key, entry.value, properties.source(key), FILE)
        for key, entry in properties.entries.items()
    ]
    named = [
        (name, key_of_env(name), ENVIRONMENT, 0)
        for name in sorted(environ)
        if name.startswith(("OPTION_", "SERVING_"))
    ]
    for option in OPTIONS:
        named += [(name, option.key, PLATFORM, order) for order, name in enumerate(option.platform)]
        named += [(name, option.key, OTHER_NAMES, order) for order, name in enumerate(option.env)]

    named += [(name, key, OTHER_NAMES, 0) for name, key in OTHER_ENV.items()]
    for name, key, layer, order in named:
        if text := environ.get(name, "").strip():
            givens.append(Given.of(key, TRANSLATED.get(name, str)(text), name, layer, order))

    return [given for given in givens if given.text]


@dataclass(slots=True)
class Values:
    """What was given and chosen for each option, on what it depends, and what its author should
    know.

    The key is that of the row in the table of options, or as written if the option has no row.
    Steps that settle the options in turn write their choices here.
    """

    environ: Mapping[str, str]
    folder: Path | None  # that is served; None: none was named
    cwd: Path
    machine: Machine
    handlers: Mapping[str, Handler]  # that are announced, by name
    fetched: Mapping[str, Path]  # the local folder of each remote source, by its text
    untrusted: Collection[
        Path
    ]  # folders of strangers, which secure mode searches as it does those that were fetched
    is_folder_asked: bool = False  # whether the command line names `folder`

    picked: dict[str, Picked] = field(default_factory=dict)
    chosen: dict[str, tuple[Any, str]] = field(default_factory=dict)  # value, why
    faults: list[str] = field(default_factory=list)  # each one stops the start
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(
        default_factory=list
    )  # the warnings about unknown keys, which `warnings` holds too
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)  # for who looks for the cause of something
    unusable: ModelUnusable | None = None  # reported after every fault of an option

    def __contains__(self, key: str) -> bool:
        return key in self.picked

    def pick(self, givens: list[Given]) -> None:
        """Pick the value that counts for each key that was given. A bad value is a fault and is
        left out.
        """
        by_key: dict[str, list[Given]] = {}
        for given in sorted(givens, key=lambda given: given.rank):
            by_key.setdefault(given.key, []).append(given)

        for key, candidates in by_key.items():
            rivals = [given for given in candidates if given.rank == candidates[0].rank]
            values = []
            for given in rivals:
                try:
                    values.append(given.value())
                except ValueError as error:
                    self.faults.append(str(error))

            if len(values) == len(rivals):
                if all(value == values[0] for value in values):
                    self.picked[key] = Picked(values[0], candidates[0], tuple(candidates[1:]))
                else:
                    said = ", ".join(given.said for given in rivals)
                    self.faults.append(f"{said}: these mean the same option, allowed is one value")

    def given(self, key: str, otherwise: Any = None) -> Any:
        return self.picked[key].value if key in self.picked else otherwise

    def how_given(self, key: str) -> Given:
        """Return the text that counts, and its source. Raises KeyError if the option
        was not given.
        """
        return self.picked[key].given

    def final(self, key: str) -> Any:
        option = find(key)
        return (
            self.chosen[key][0]
            if key in self.chosen
            else self.given(key, option and option.default)
        )

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
        rows = [row for row in OPTIONS if row.field.startswith(f"{part}.")]
        known = [row for row in rows if row.key in self.picked or row.key in self.chosen]
        return {row.field.removeprefix(f"{part}."): self.final(row.key) for row in known}

    def refuse(self, key: str, allowed: str) -> None:
        unsaid = f"{key}={self.final(key)} (not given): allowed is {allowed}"
        self.faults.append(self.how_given(key).fault(allowed) if key in self.picked else unsaid)

    def warn(self, said: str) -> None:
        self.warnings.append(said)

    def note(self, said: str) -> None:
        self.notes.append(said)

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
    shadowed: tuple[
        str, ...
    ] = ()  # "value (source)" of each value that was given and does not count

    @classmethod
    def of(cls, values: Values, key: str) -> Self:
        value = written(key, values.final(key))
        picked = values.picked.get(key)
        (_, reason) = values.chosen.get(key, (None, ""))
        if picked is None:
            return cls(key, value, reason or "default")

        shadowed = tuple(f"{given.shown} ({given.source})" for given in picked.shadowed)
        source = ", ".join(filter(None, (picked.given.source, reason)))
        return cls(key, "***" if picked.given.shown == "***" else value, source, shadowed)


def written(key: str, value: Any) -> str:
    """Return an option's value in the form that serving.properties has."""
    if value is None:
        return option.kind.unset if (option := find(key)) else ""

    if value == {}:
        return ""

    if isinstance(value, bool):
        return str(value).lower()

    if isinstance(value, float):
        return f"{value:g}"

    return ";".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
