"""The configuration of an engine in two forms, the contract's and the server's options, and what
engines make of them.

An Executor takes either. What both have is translated here; the rest of each form has its defaults
in the other.
"""

import importlib.util
import logging
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from lmi.errors import ModelUnusable, SecurityRefused, Unsupported, cause_line
from lmi.executor import (
    AdditionalModelOutput,
    ExecutorConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    Request,
)
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

AnyConfig: TypeAlias = ExecutorConfig | EngineConfig
# It stands behind the name of an additional output in an option that asks for the prompt's rows
# too.
CONTEXT = ":context"

log = logging.getLogger(__name__)


def both(config: AnyConfig | None) -> tuple[ExecutorConfig, EngineConfig]:
    """A configuration in both forms. Raises ValueError for an ExecutorConfig that breaks a rule."""
    if isinstance(config, EngineConfig):
        return executor_config(config), config

    config = config or ExecutorConfig()
    config.check()
    return config, engine_config(config)


def settled(
    title: str,
    model: str | os.PathLike[str] | bytes,
    json_config_str: str | AnyConfig | None,
    config: AnyConfig | None,
) -> tuple[str, ExecutorConfig, EngineConfig]:
    """The model's folder, and the configuration in both forms, from the arguments of an `Executor`.

    It is that of a library, by its `title`, which reads the folder and its tokenizer itself. Raises
    Unsupported for a buffer in place of a folder, ValueError for an ExecutorConfig that breaks a
    rule.
    """
    if isinstance(model, bytes) or isinstance(json_config_str, str):
        raise Unsupported("engine_buffer", f"{title} reads a model from its folder")

    settings, options = both(json_config_str or config)
    if settings.guided_decoding_config is not None:
        log.info("guided_decoding_config is not needed: %s reads the model's own tokenizer", title)

    return os.fspath(model), settings, options


def executor_config(config: EngineConfig) -> ExecutorConfig:
    """What requests may ask for, and the limits, as the options say."""
    most = config.max_num_sequences or config.max_beam_width
    outputs = []
    for text in config.additional_outputs:
        output = AdditionalModelOutput(text.removesuffix(CONTEXT), text.endswith(CONTEXT))
        outputs.append(output)

    return ExecutorConfig(
        min(config.max_beam_width, most),
        max_batch_size=config.max_num_sequences,
        max_num_tokens=config.max_prefill_tokens,
        max_queue_size=config.max_queue_size,
        request_stats_max_iterations=config.request_stats_max_iterations,
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=config.enable_prefix_caching is not False,
            max_tokens=config.max_kv_cache_tokens,
        ),
        additional_model_outputs=tuple(outputs),
    )


def engine_config(config: ExecutorConfig) -> EngineConfig:
    """The options that mean the same as the fields of an ExecutorConfig."""
    outputs = []
    for output in config.additional_model_outputs:
        outputs.append(output.name + CONTEXT * output.gather_context)

    return EngineConfig(
        max_beam_width=config.max_beam_width,
        max_num_sequences=config.max_batch_size,
        max_prefill_tokens=config.max_num_tokens,
        max_queue_size=config.max_queue_size,
        request_stats_max_iterations=config.request_stats_max_iterations,
        enable_prefix_caching=config.kv_cache_config.enable_block_reuse,
        max_kv_cache_tokens=config.kv_cache_config.max_tokens,
        additional_outputs=tuple(outputs),
    )


# The file of logits post-processors: Python of the user, which the process of the engine runs.

BATCHED = Request.BATCHED_POST_PROCESSOR_NAME
# The variable that the file must have.
VARIABLE = "logits_post_processors"


def load_post_processors(path: Path) -> LogitsPostProcessorConfig:
    """The configuration in a Python file, which may import the modules beside it. Raises
    ModelUnusable.
    """
    try:
        config = getattr(_run(path), VARIABLE)
        check_post_processors(config)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ModelUnusable(f"{place}: {said(error)}") from error

    assert isinstance(config, LogitsPostProcessorConfig)
    return config


def _run(path: Path) -> ModuleType:
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


def said(error: BaseException) -> str:
    """One line with the kind of an error and its text."""
    return f"{type(error).__name__}: {cause_line(error)}"


# What engines make of options alike.

# The tokens of one block.
MIN_TOKENS = 16


def default_budget(
    max_num_sequences: int, max_length: int, token_bytes: int, memory_bytes: int
) -> int:
    """Tokens of cache: room for all sequences at 2048 tokens each, at most a quarter of memory, at
    least one block.
    """
    num_useful_tokens = max_num_sequences * min(max_length, 2048)
    num_affordable_tokens = memory_bytes // 4 // token_bytes
    return max(min(num_useful_tokens, num_affordable_tokens), MIN_TOKENS)


PATTERNS = ("*.bin", "*.pt", "*.pth")


def pickled_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in PATTERNS for file in folder.glob(pattern))


def refusal(file: Path) -> SecurityRefused:
    return SecurityRefused(
        f"{file}: pickled weights can run code when they are read, so they are refused; convert "
        f"them to safetensors, or set option.allow_pickle=true if you trust them"
    )
