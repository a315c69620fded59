"""The form in which TensorRT-LLM gets a sequence: the arguments of one `LLM.generate_async`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm import SamplingParams

from handlers.base.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """`sequence` says what of the outputs is wanted. The engine's thread only reads what never changes of it."""

    id: str
    token_ids: list[int]
    params: SamplingParams  # never shared: a submit changes it
    more: dict[str, Any]  # further keyword arguments; only those that the profile's signature has
    sequence: Sequence
    is_streamed: bool = True  # also where the client does not stream: each output shows that the engine goes on
