"""The configuration of an engine in two forms, the contract's and the server's options.

An Executor takes either. What both have is translated here; the rest of each form has its defaults
in the other.
"""

import logging
import os
from typing import TypeAlias

from lmi.errors import Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    ExecutorConfig,
    KvCacheConfig,
)
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
