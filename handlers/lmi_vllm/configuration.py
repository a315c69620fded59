"""What vLLM lacks of an Executor's configuration."""

from __future__ import annotations

from lmi.errors import Unsupported
from lmi.executor import ExecutorConfig
from lmi.settings.config import EngineConfig


def check(settings: ExecutorConfig, options: EngineConfig) -> None:
    """Raise Unsupported, with the reason, for a field that asks for what vLLM lacks."""
    if settings.logits_post_processor_config or options.logits_post_processors:
        raise Unsupported("logits_post_processor_config", "vLLM calls no function of a request on its logits")
    if settings.additional_model_outputs:
        raise Unsupported("additional_model_outputs", "a step of vLLM returns only tokens")
