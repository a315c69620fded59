"""Finds the function that loads an engine. It is the first to import the engine's module."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Protocol, cast

from lmi.errors import BadConfiguration
from lmi.executor import Executor, Progress
from lmi.settings.config import EngineConfig


class Loader(Protocol):
    """Loads a model and returns the engine that runs it.

    Raises a StartError that names the file or option at fault, or ImportError for a library that is not installed.
    """

    def __call__(self, config: EngineConfig, model_path: str, progress: Progress) -> Executor: ...


def resolve(handler: str, load: str) -> Loader:
    """Return the function `load`, a "module:function", which loads the engine of `handler`.

    Raises BadConfiguration for a handler whose library is missing.
    """
    module, _, name = load.partition(":")
    try:
        return cast(Loader, attrgetter(name)(import_module(module)))
    except ImportError as error:
        raise missing_library(handler, error) from error


def missing_library(handler: str, error: ImportError) -> BadConfiguration:
    return BadConfiguration(f"engine {handler} cannot be used here, a library is missing: {error}")
