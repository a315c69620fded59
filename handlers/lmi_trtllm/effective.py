"""The arguments of a loaded LLM: those that it was given, and where they say nothing, those that it settled on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorrt_llm import LLM

# TensorRT-LLM's own, for what an LLM leaves open.
MAX_BATCH_SIZE = 2048


class Effective:
    def __init__(self, given: Mapping[str, Any], llm: LLM) -> None:
        self._given, self._settled = given, llm.args

    def get(self, name: str) -> Any:
        """The value of an argument, or None if neither says it."""
        value = self._given.get(name)
        return getattr(self._settled, name, None) if value is None else value

    @property
    def max_num_sequences(self) -> int:
        return int(self.get("max_batch_size") or MAX_BATCH_SIZE)

    @property
    def max_beam_width(self) -> int:
        return int(self.get("max_beam_width") or 1)

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt, where a step must take it whole; else None."""
        return None if self.get("enable_chunked_prefill") else self.get("max_num_tokens")

    @property
    def stream_interval(self) -> int:
        """The number of steps that an output brings."""
        return int(self.get("stream_interval") or 1)

    @property
    def sampler_type(self) -> str:
        value = self.get("sampler_type")
        return str(getattr(value, "value", value))

    @property
    def max_loras(self) -> int:
        config = self.get("lora_config")
        return 0 if config is None else int(config.max_loras)
