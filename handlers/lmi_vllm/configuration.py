"""An Executor's configuration, less what vLLM lacks, which is refused with the reason."""

from __future__ import annotations

import logging
import os

from handlers.base.configuration import AnyConfig, both
from lmi.errors import Unsupported
from lmi.executor import ExecutorConfig
from lmi.settings.config import EngineConfig

log = logging.getLogger("lmi.vllm")


def settled(
    model: str | os.PathLike[str] | bytes, json_config_str: str | AnyConfig | None, config: AnyConfig | None
) -> tuple[str, ExecutorConfig, EngineConfig]:
    """The model's folder, and the configuration in both forms, from the arguments of `Executor`.

    Raises Unsupported for what vLLM lacks, ValueError for an ExecutorConfig that breaks a rule.
    """
    if isinstance(model, bytes) or isinstance(json_config_str, str):
        raise Unsupported("engine_buffer", "vLLM reads a model from its folder")
    settings, options = both(json_config_str or config)
    for name, reason in _lacking(settings, options):
        raise Unsupported(name, reason)
    if settings.guided_decoding_config is not None:
        log.info("guided_decoding_config is not needed: vLLM reads the model's own tokenizer")
    return os.fspath(model), settings, options


def _lacking(settings: ExecutorConfig, options: EngineConfig) -> list[tuple[str, str]]:
    """Each field that asks for what vLLM lacks, with the reason."""
    has_processors = settings.logits_post_processor_config or options.logits_post_processors
    lacking = [
        ("logits_post_processor_config", bool(has_processors), "vLLM calls no function of a request on its logits"),
        ("additional_model_outputs", bool(settings.additional_model_outputs), "a step of vLLM returns only tokens"),
    ]
    return [(name, reason) for name, is_asked, reason in lacking if is_asked]
