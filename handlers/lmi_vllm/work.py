"""The form in which vLLM gets a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.inputs import TokensInput, tokens_input
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from handlers.base.adapters import LoadedAdapter
from handlers.base.name_patterns import is_plain
from lmi.errors import shorten


@dataclass(frozen=True, slots=True)
class VllmWork:
    id: str
    token_ids: list[int]
    params: SamplingParams
    adapter: LoRARequest | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float | None = None  # time.time(), for its place in the queue; None: now

    @property
    def prompt(self) -> TokensInput:
        prompt = tokens_input(self.token_ids, cache_salt=self.cache_salt)
        if self.arrival_time is not None:
            prompt["arrival_time"] = self.arrival_time
        return prompt


def check_adapter(adapter: LoadedAdapter, config: VllmConfig) -> None:
    """Raise ValueError unless vLLM can use an adapter of this rank and kind.

    vLLM compares patterns of names by an engine that some of them keep busy for ever, so only plain ones get there.
    """
    assert config.lora_config is not None
    helper = PEFTHelper.from_local_dir(adapter.path, config.model_config.max_model_len)
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(helper, name, None) or ():  # vLLM 0.30 has neither
            if not is_plain(pattern):
                raise ValueError(f"{name} has {shorten(pattern)}, which is more than a name: list the names instead")
    helper.validate_legal(config.lora_config)


def lora_request(adapter: LoadedAdapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.number, adapter.path)
