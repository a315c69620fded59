"""The file of logits post-processors: Python of the user, which the process of the engine runs."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lmi.errors import ModelUnusable, error_line
from lmi.executor import LogitsPostProcessorConfig, Request
from lmi.executor.checks import broken

BATCHED = Request.BATCHED_POST_PROCESSOR_NAME
# The variable that the file must have.
VARIABLE = "logits_post_processors"


def load_post_processors(path: Path) -> LogitsPostProcessorConfig:
    """Return the configuration in a Python file, which may import the modules beside it.

    Raises ModelUnusable.
    """
    try:
        config = getattr(_run(path), VARIABLE)
        check_post_processors(config)
    except (Exception, SystemExit) as error:
        place = _place_of(error, path)
        raise ModelUnusable(f"{place}: {error_line(error)}") from error

    assert isinstance(config, LogitsPostProcessorConfig)
    return config


def _place_of(error: BaseException, path: Path) -> str:
    """Return the file, and the last line of it that led to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if not lines:
        return str(path)

    return f"{path}, line {lines[-1]}"


def _run(path: Path) -> ModuleType:
    """Run a Python file as a module."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))

    # The name must not hide a module of a library.
    name = f"{VARIABLE}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "not a Python file"

    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look the module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check_post_processors(config: object) -> None:
    """Raise ValueError if this is not a configuration that can be used."""
    if not isinstance(config, LogitsPostProcessorConfig):
        raise broken(VARIABLE, "a LogitsPostProcessorConfig", config)

    if BATCHED in config.processor_map:
        raise ValueError(
            f"processor_map must not have the key {BATCHED!r}, the name of processor_batched"
        )

    for name, function in config.processor_map.items():
        if not isinstance(name, str) or not name:
            raise broken("a key of processor_map", "a name", name)

        if not callable(function):
            raise broken(f"processor_map[{name!r}]", "a function", function)

    if config.processor_batched is not None and not callable(config.processor_batched):
        raise broken("processor_batched", "a function", config.processor_batched)
