"""An Executor's configuration, less what TensorRT-LLM lacks, which is refused with the reason."""

from __future__ import annotations

import logging
import os

from handlers.base.configuration import AnyConfig, both
from lmi.errors import Unsupported
from lmi.executor import ExecutorConfig
from lmi.settings.config import EngineConfig

FUNCTIONS = "TensorRT-LLM's processes read functions from a file, which option.logits_post_processors names"

log = logging.getLogger("lmi.trtllm")


def settled(
    model: str | os.PathLike[str] | bytes, json_config_str: str | AnyConfig | None, config: AnyConfig | None
) -> tuple[str, ExecutorConfig, EngineConfig]:
    """The model's folder, and the configuration in both forms, from the arguments of `Executor`.

    Raises Unsupported for what TensorRT-LLM lacks, ValueError for an ExecutorConfig that breaks a rule.
    """
    if isinstance(model, bytes) or isinstance(json_config_str, str):
        raise Unsupported("engine_buffer", "TensorRT-LLM's LLM reads a model from its folder")
    settings, options = both(json_config_str or config)
    if settings.logits_post_processor_config is not None:
        raise Unsupported("logits_post_processor_config", FUNCTIONS)
    if settings.guided_decoding_config is not None:
        log.info("guided_decoding_config is not needed: TensorRT-LLM reads the model's own tokenizer")
    return os.fspath(model), settings, options
