"""From the name of a handler to the function that loads it.

Handlers announce themselves in the entry-point group `lmi.handlers`, so a package of someone else's can add an engine
without a change here. A handler's module is imported only when it is asked for.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, cast

from lmi.errors import BadConfiguration
from lmi.executor import Executor, Progress
from lmi.settings.config import EngineConfig

GROUP = "lmi.handlers"


class Load(Protocol):
    """What every entry point of the group is: loads a model and returns the engine that runs it.

    Raises a StartError that names the file or option at fault, or ImportError for a library that is not installed.
    """

    def __call__(self, config: EngineConfig, model_path: str, progress: Progress) -> Executor: ...


def resolve(handler: str) -> Load:
    """Raises BadConfiguration for a name that nobody announced and for a handler whose library is missing."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if handler not in found:
        raise BadConfiguration(f"option.rolling_batch: no engine is called {handler!r}, there are {sorted(found)}")
    try:
        return cast(Load, found[handler].load())
    except ImportError as error:
        raise missing_library(handler, error) from error


def missing_library(handler: str, error: ImportError) -> BadConfiguration:
    return BadConfiguration(f"engine {handler} cannot be used here, a library is missing: {error}")
