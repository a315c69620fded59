"""The record in which an engine describes itself, so that settings are resolved without any engine.

Packages announce it in the entry-point group `lmi.handlers`, as `module:HANDLER` in a module that
is cheap to import, because the supervisor does. Any other entry point names the function that loads
an engine with the default record.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig, SamplingDefaults

GROUP = "lmi.handlers"
RECORD = "HANDLER"


class Auto(Enum):
    """The machines on which `option.rolling_batch=auto` chooses an engine."""

    NEVER = "never"
    # also in place of an engine that lacks what the options ask for, as several devices
    ON_GPUS = "on GPUs"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """One engine. Options have the names that serving.properties uses."""

    load: str  # "module:function", which only the engine's process imports
    library: str = ""  # the package that it needs
    distributions: tuple[str, ...] = ()  # the names under which that package is published
    auto: Auto = Auto.NEVER
    other_names: tuple[str, ...] = ()  # further words of option.rolling_batch that mean it
    is_one_device: bool = False
    reads_images: bool = False  # with some models
    quantize_methods: frozenset[str] | None = (
        None  # values of option.quantize that it has; None: it says itself
    )
    defaults: Mapping[str, object] = field(default_factory=dict)  # option -> value
    embedding_options: Mapping[str, str] = field(default_factory=dict)
    """Its own options, without `option.`, that make it give embeddings where `option.task` says
    that it should.
    """
    sampling_defaults: SamplingDefaults | None = None  # that the LMI APIs document for it
    uses: frozenset[str] = (
        frozenset()
    )  # those with `otherwise` in their Option that have an effect on it
    unused: Mapping[str, str] = field(
        default_factory=dict
    )  # option of other engines -> what to do instead, or nothing
    means: Mapping[str, str] = field(default_factory=dict)
    """Options that set something of another name: an option of the table, or one of the engine's
    own arguments.
    """
    wins: frozenset[str] = (
        frozenset()
    )  # those of `means` that count where the option of the table is given too
    caveat: str = ""  # what its user must know, said at every start
    on_cluster: Mapping[str, str] = field(
        default_factory=dict
    )  # option -> text with which a cluster places the ranks
    port_variables: tuple[
        str, ...
    ] = ()  # variables that each name a TCP port on which one of its processes listens
    demo: Path | None = None  # the folder of a small model that comes with it
    option_names: Callable[[], frozenset[str] | None] = lambda: None
    """Returns the options that it reads beside those of the table, without `option.`. None: it
    takes every option.
    """
    ignores_unknown: bool = (
        False  # an option that neither lmi nor `option_names` lists has no effect on it
    )
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
        names = self.option_names()
        return None if names is None else frozenset(f"option.{name}" for name in names)


USER_CODE = Handler(load="")  # the record of user code that is the model


@cache  # the metadata of all installed packages is read once in a process
def announced() -> Mapping[str, Handler]:
    """Return every announced engine by its name, also those whose library is not installed."""
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    return {name: _record(entry) for name, entry in sorted(entries.items())}


def installed(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return those that need no library, or whose library is there."""
    return {
        name: one
        for name, one in handlers.items()
        if not one.library or folder_of(one.library) is not None
    }


def folder_of(library: str) -> Path | None:
    """Return the folder of a top-level package without importing it, or None if it is not
    installed.
    """
    spec = importlib.util.find_spec(library)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _record(entry: EntryPoint) -> Handler:
    if entry.attr != RECORD:
        return Handler(load=entry.value)

    try:
        handler = entry.load()
    except Exception:  # the engine's process, which imports it too, says why
        return Handler(load=entry.value)

    if not isinstance(handler, Handler):
        raise BadConfiguration(f"entry point {entry.name}: {entry.value} is not a Handler")

    return handler
