"""The configuration of an adapter in the form that PEFT saves.

What is not plain LoRA on linears, by the rules of PEFT 0.21, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from handlers.base.adapter_names import check_names, is_end
from lmi.adapters.files import CONFIG

Number = TypeVar("Number", int, float)
# Names of methods of initialisation that also change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings that make something else of an adapter than low ranks of linears.
REFUSED = {
    "modules_to_save": (
        "it replaces whole modules (modules_to_save); merge it into the model and serve that"
    ),
    "use_dora": "it is a DoRA adapter, which also rescales the weights",
    "trainable_token_indices": "it changes rows of the embedding (trainable_token_indices)",
    "lora_bias": "it has biases (lora_bias)",
    "target_parameters": "it changes parameters that are not linears (target_parameters)",
    "layer_replication": "it repeats layers of the model (layer_replication)",
    "alora_invocation_tokens": "it is active for a part of the prompt (alora_invocation_tokens)",
    "use_qalora": "it is a QALoRA adapter, which pools the inputs",
    "use_bdlora": "it is a block-diagonal adapter (use_bdlora)",
    "arrow_config": "it chooses among several adapters (arrow_config)",
    "kasa_config": "it is a KaSA adapter, which has singular values",
}


class NotUsable(Exception):
    """This engine cannot use the adapter. The text says why."""


class PeftConfig(msgspec.Struct, frozen=True):
    """What of adapter_config.json is used. `None` is PEFT's word for nothing."""

    peft_type: str = "LORA"
    r: Annotated[int, Meta(ge=1)] = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, Annotated[int, Meta(ge=1)]] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, path: str) -> int:
        """Return the rank of a linear, by its path."""
        return _pattern_value(self.rank_pattern or {}, path, self.r)

    def scale(self, path: str) -> float:
        """Return the factor of B A for a linear, by its path."""
        rank = self.rank(path)
        alpha = _pattern_value(self.alpha_pattern or {}, path, self.lora_alpha)
        if self.use_rslora:
            return float(alpha / rank**0.5)

        return float(alpha / rank)


def _pattern_value(patterns: Mapping[str, Number], path: str, otherwise: Number) -> Number:
    """The value of the first name that is the path or its end."""
    for name, value in patterns.items():
        if is_end(name, path):
            return value

    return otherwise


def check_rank(rank: int, max_rank: int) -> None:
    """Raise NotUsable if there is no room for a rank."""
    if rank > max_rank:
        raise NotUsable(f"its rank {rank} is over option.max_lora_rank={max_rank}")


def read_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json.

    Raises NotUsable, or what the file system and the decoder raise.
    """
    raw = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    try:
        config = msgspec.convert(raw, PeftConfig)
        check_names(rank_pattern=config.rank_pattern, alpha_pattern=config.alpha_pattern)
    except (msgspec.ValidationError, ValueError) as error:
        raise NotUsable(f"{CONFIG}: {error}") from None

    if config.peft_type.upper() != "LORA":
        raise NotUsable(f"it is an adapter of type {config.peft_type}, and only LORA is supported")

    if config.bias != "none":
        raise NotUsable(f"it changes biases (bias={config.bias})")

    method = config.init_lora_weights
    if isinstance(method, str) and method.lower().startswith(_CHANGES_BASE):
        raise NotUsable(
            f"it belongs to a base model whose weights {method} changed; "
            "convert it to a plain LoRA adapter"
        )

    for name, reason in REFUSED.items():
        if raw.get(name):
            raise NotUsable(reason)

    return config
