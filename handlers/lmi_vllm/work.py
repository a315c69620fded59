"""The form in which vLLM gets a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from handlers.base.adapters import LoadedAdapter


@dataclass(frozen=True, slots=True)
class Work:
    id: str
    token_ids: list[int]
    params: SamplingParams
    adapter: LoRARequest | None = None
    priority: int = 0


def lora_request(adapter: LoadedAdapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.number, adapter.path)
