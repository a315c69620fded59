"""The file of an engine's logits post-processors: Python of the user, which the process of the engine runs."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lmi.errors import ModelUnusable, cause_line
from lmi.executor import LogitsPostProcessorConfig, Request
from lmi.executor.checks import broken

BATCHED = Request.BATCHED_POST_PROCESSOR_NAME
VARIABLE = "logits_post_processors"  # what the file holds


def load(path: Path) -> LogitsPostProcessorConfig:
    """The configuration in a Python file, which may import the modules beside it. Raises ModelUnusable."""
    try:
        config = getattr(_run(path), VARIABLE)
        check(config)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ModelUnusable(f"{place}: {said(error)}") from error
    assert isinstance(config, LogitsPostProcessorConfig)
    return config


def _run(path: Path) -> ModuleType:
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"{VARIABLE}_{path.stem}"  # must not hide a module of a library
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def check(config: object) -> None:
    """Raise ValueError if this is not a configuration that can be used."""
    if not isinstance(config, LogitsPostProcessorConfig):
        raise broken(VARIABLE, "a LogitsPostProcessorConfig", config)
    if BATCHED in config.processor_map:
        raise ValueError(f"processor_map must not have the key {BATCHED!r}, the name of processor_batched")
    for name, function in config.processor_map.items():
        if not isinstance(name, str) or not name:
            raise broken("a key of processor_map", "a name", name)
        if not callable(function):
            raise broken(f"processor_map[{name!r}]", "a function", function)
    if config.processor_batched is not None and not callable(config.processor_batched):
        raise broken("processor_batched", "a function", config.processor_batched)


def said(error: BaseException) -> str:
    """One line with the kind of an error and its text."""
    return f"{type(error).__name__}: {cause_line(error)}"
