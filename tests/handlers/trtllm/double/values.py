"""What the package's plain classes check and do. `made.py` gives them their fields, from the facts.

A name without an underscore that the profile does not have is left out of the package's class.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.handlers.trtllm.double import sampling
from tests.handlers.trtllm.double.guide import is_any


class SamplingParams:
    """A submit changes it."""

    def __post_init__(self: Any) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id

        self.best_of = self.best_of or self.n
        self._stream_interval = None
        if self.embedding_bias is not None:
            self.embedding_bias = (
                torch.as_tensor(self.embedding_bias, dtype=torch.float32).detach().clone()
            )

        for fault in self._faults():
            raise ValueError(fault)

        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    def _faults(self: Any) -> list[str]:
        checks = {
            f"require 0 <= top_p <= 1, got top_p={self.top_p}": self.top_p is None
            or 0 <= self.top_p <= 1,
            f"require top_k >= 0, got top_k={self.top_k}": self.top_k is None or self.top_k >= 0,
            f"require temperature >= 0, got temperature={self.temperature}": (self.temperature or 0)
            >= 0,
            f"best_of ({self.best_of}) cannot be less than n ({self.n})": self.best_of >= self.n,
            f"Greedy decoding does not allow several returns, got best_of={self.best_of}": not self._is_many_greedy(),  # noqa: E501
            f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}": self.truncate_prompt_tokens  # noqa: E501
            is None
            or self.truncate_prompt_tokens >= 1,
        }
        return [fault for fault, is_kept in checks.items() if not is_kept]

    def _is_many_greedy(self: Any) -> bool:
        is_allowed = self.use_beam_search or bool(os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"))
        return self.best_of > 1 and not is_allowed and sampling.is_greedy(self)


class GuidedDecodingParams:
    def _validate(self: Any) -> None:
        num = sum(
            bool(guide)
            for guide in (
                self.json,
                self.regex,
                self.grammar,
                self.json_object,
                self.structural_tag,
            )
        )
        if num > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {num}.")

    def _is_any(self: Any) -> bool:
        return is_any(self)


class LoRARequest:
    def __post_init__(self: Any) -> None:
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(
                f"lora_ckpt_source must be one of 'hf' or 'nemo', got {self.lora_ckpt_source}"
            )

        if not Path(self.lora_path).exists() or not self.lora_path:
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    @property
    def adapter_id(self: Any) -> int:
        return int(self.lora_int_id)

    @property
    def path(self: Any) -> str:
        return str(self.lora_path)


class KvCacheRetentionConfig:
    """A class of the C++ bindings, which check types."""

    def __post_init__(self: Any) -> None:
        kind = type(self).TokenRangeRetentionConfig
        for range_config in self.token_range_retention_configs:
            if not isinstance(range_config, kind):
                raise TypeError(
                    f"incompatible constructor arguments: {range_config!r} is no "
                    "TokenRangeRetentionConfig"
                )

        if not 0 <= self.decode_retention_priority <= 100:
            raise RuntimeError(
                f"decode_retention_priority ({self.decode_retention_priority}) must be 0 to 100"
            )
