"""The record in which an engine describes itself, so that settings are resolved without any engine.

Packages announce it in the entry-point group `lmi.handlers`, as `module:HANDLER` in a module that
is cheap to import, because the supervisor does. Any other entry point names the function that loads
an engine with the default record.
"""

import importlib.util
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from msgspec import Struct, field

from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig, SamplingDefaults

GROUP = "lmi.handlers"
RECORD = "HANDLER"


class Auto(Enum):
    """The machines on which `option.rolling_batch=auto` chooses an engine."""

    NEVER = "never"
    # It also stands in for an engine that lacks what the options ask for, such as several devices.
    ON_GPUS = "on GPUs"
    ELSEWHERE = "elsewhere"


class Handler(Struct, frozen=True, kw_only=True):
    """One engine. Options have the names that serving.properties uses."""

    # "module:function", which only the engine's process imports.
    load: str
    # The package that it needs.
    library: str = ""
    # The names under which that package is published.
    distributions: tuple[str, ...] = ()
    auto: Auto = Auto.NEVER
    # Further words of `option.rolling_batch` that mean it.
    other_names: tuple[str, ...] = ()
    is_one_device: bool = False
    # Whether some of its models read images.
    reads_images: bool = False
    reads_gguf: bool = False
    # The values of `option.quantize` that it has. None means that it checks them itself.
    quantize_methods: frozenset[str] | None = None
    # The defaults of options that are the engine's own, by option.
    defaults: Mapping[str, object] = field(default_factory=dict)
    embedding_options: Mapping[str, str] = field(default_factory=dict)
    """Its own options, without `option.`, that make it give embeddings where `option.task` says
    that it should.
    """
    # The defaults that the LMI APIs document for it.
    sampling_defaults: SamplingDefaults | None = None
    # The options that have an effect on it, of those with `otherwise` in their Option.
    uses: frozenset[str] = frozenset()
    # Options of other engines that have no effect on it, and what to do instead, or "".
    unused: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, str] = field(default_factory=dict)
    """Options that set something of another name: an option of the table, or one of the engine's
    own arguments.
    """
    # The options of `means` that count before the option of the table, if both are given.
    wins: frozenset[str] = frozenset()
    # What its user must know, said at every start.
    caveat: str = ""
    # Options and their values with which a cluster places the ranks.
    on_cluster: Mapping[str, str] = field(default_factory=dict)
    # Variables that each name a TCP port on which one of its processes listens.
    port_variables: tuple[str, ...] = ()
    # The folder of a small model that comes with it.
    demo: Path | None = None
    option_names: Callable[[], frozenset[str] | None] = lambda: None
    """Returns the options that it reads beside those of the table, without `option.`. None: it
    takes every option.
    """
    # Whether an option that neither lmi nor `option_names` lists has no effect on it.
    ignores_unknown: bool = False
    check: Callable[[EngineConfig], Mapping[str, str]] = lambda config: {}
    """Returns each option whose value it cannot run with, and the values that are allowed."""
    check_model: Callable[[Path], None] = lambda folder: None
    """Raises ModelUnusable for a folder whose config.json shows that it cannot run the model."""
    environment: Callable[[EngineConfig, Mapping[str, str], int, str], Mapping[str, str]] = (
        lambda *process: {}
    )
    """Returns variables for its process, from configuration, environment, slot, and a folder for
    sockets or ''.
    """
    dtypes: Callable[[EngineConfig, str], tuple[str, str]] = lambda config, stored: (
        config.dtype,
        config.dtype,
    )
    """Returns the dtypes of weights and of the KV cache in a CPU's memory, from configuration and
    dtype of the files.

    `auto` means that it is not known; the largest then counts.
    """
    describe: Callable[[], str] = lambda: ""
    """Returns what of it depends on the machine, for `lmi version`; "" if nothing does."""

    def option_keys(self) -> frozenset[str] | None:
        """Return what `option_names` returns, with `option.`."""
        names = self.option_names()
        if names is None:
            return None

        return frozenset(f"option.{name}" for name in names)


# The record of user code that is the model.
USER_CODE = Handler(load="")


class ChosenEngine(Struct, frozen=True):
    """The engine that was chosen, or the one that the option names if that was refused."""

    name: str
    handler: Handler
    reason: str = ""
    has_dynamic_batch: bool = False


# The metadata of all installed packages is read once in a process.
@cache
def announced() -> Mapping[str, Handler]:
    """Return every announced engine by its name, also if its library is not installed."""
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    return {name: _record(entry) for name, entry in sorted(entries.items())}


def installed(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return the engines that need no library, or whose library is installed."""
    usable: dict[str, Handler] = {}
    for name, handler in handlers.items():
        if not handler.library or folder_of(handler.library) is not None:
            usable[name] = handler

    return usable


def folder_of(library: str) -> Path | None:
    """Return the folder of a top-level package without importing it, or None if it is not
    installed.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.origin:
        return None

    return Path(spec.origin).parent


def _record(entry: EntryPoint) -> Handler:
    """Return the record of an entry point. Raises BadConfiguration if it is something else."""
    if entry.attr != RECORD:
        return Handler(load=entry.value)

    try:
        handler = entry.load()
    except Exception:
        # The engine's process, which imports it too, says why.
        return Handler(load=entry.value)

    if not isinstance(handler, Handler):
        raise BadConfiguration(f"entry point {entry.name}: {entry.value} is not a Handler")

    return handler
