"""Finds the function that loads an engine by the handler's name. It is the first to import the engine's module."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Protocol, cast

from lmi.errors import BadConfiguration
from lmi.executor import Executor, Progress
from lmi.settings.config import EngineConfig
from lmi.settings.handler import GROUP, announced


class Loader(Protocol):
    """Loads a model and returns the engine that runs it.

    Raises a StartError that names the file or option at fault, or ImportError for a library that is not installed.
    """

    def __call__(self, config: EngineConfig, model_path: str, progress: Progress) -> Executor: ...


def resolve(handler: str) -> Loader:
    """Return the function that loads the engine of `handler`.

    Raises BadConfiguration for a name that no package announces and for a handler whose library is missing.
    """
    found = announced()
    if handler not in found:
        raise BadConfiguration(f"option.rolling_batch: no engine is called {handler!r}, there are {sorted(found)}")
    try:
        return cast(Loader, EntryPoint(handler, found[handler].load, GROUP).load())
    except ImportError as error:
        raise missing_library(handler, error) from error


def missing_library(handler: str, error: ImportError) -> BadConfiguration:
    return BadConfiguration(f"engine {handler} cannot be used here, a library is missing: {error}")
