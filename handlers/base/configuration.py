"""The configuration of an engine in its two forms, and each made from the other.

A library configures an Executor with the contract's ExecutorConfig, a server with its options, an
EngineConfig. What only one form has, has its default in the other.
"""

import logging
import os
from typing import TypeAlias

from lmi.errors import Unsupported
from lmi.executor import AdditionalModelOutput, ExecutorConfig, KvCacheConfig
from lmi.settings.config import EngineConfig

AnyConfig: TypeAlias = ExecutorConfig | EngineConfig
# In an option, the end of the name of an output of which the prompt's rows are wanted too.
CONTEXT = ":context"

log = logging.getLogger(__name__)


def both(config: AnyConfig | None) -> tuple[ExecutorConfig, EngineConfig]:
    """Return a configuration in both forms.

    Raises ValueError for an ExecutorConfig that breaks a rule.
    """
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
    """Return the model's folder, and the configuration in both forms, from the arguments of an
    Executor over a library, which is called `title`.

    Such a library reads a model from its folder, with its tokenizer. Raises Unsupported for a
    buffer, ValueError for an ExecutorConfig that breaks a rule.
    """
    if isinstance(model, bytes) or isinstance(json_config_str, str):
        raise Unsupported("engine_buffer", f"{title} reads a model from its folder")

    settings, options = both(json_config_str or config)
    if settings.guided_decoding_config is not None:
        log.info("guided_decoding_config is not needed: %s reads the model's own tokenizer", title)

    return os.fspath(model), settings, options


def executor_config(config: EngineConfig) -> ExecutorConfig:
    """Return the ExecutorConfig that means the same as the options, as far as it has them."""
    outputs = []
    for text in config.additional_outputs:
        name = text.removesuffix(CONTEXT)
        output = AdditionalModelOutput(name, gather_context=text.endswith(CONTEXT))
        outputs.append(output)

    # A search has no more beams than there may be sequences.
    max_beam_width = config.max_beam_width
    if config.max_num_sequences:
        max_beam_width = min(max_beam_width, config.max_num_sequences)

    return ExecutorConfig(
        max_beam_width=max_beam_width,
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
    """Return the options that mean the same as an ExecutorConfig."""
    outputs = []
    for output in config.additional_model_outputs:
        suffix = CONTEXT if output.gather_context else ""
        outputs.append(output.name + suffix)

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
