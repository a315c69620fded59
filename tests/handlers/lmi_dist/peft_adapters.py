"""LoRA adapters that PEFT makes and merges for the small models, with random weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

# Of the weights; enough to change most tokens
WIDTH = 0.3


def make(
    model: Path,
    folder: Path,
    *,
    seed: int = 0,
    width: float = WIDTH,
    save_embedding_layers: Any = "auto",
    **settings: Any,
) -> Path:
    """Save an adapter of a model with PEFT's settings; `r` is 4 unless they say otherwise."""
    peft_model = _peft(model, **{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)

    return folder


def merged(model: Path, folder: Path | None) -> Any:
    """The model of transformers into which PEFT has merged an adapter, in float32.

    Where the head is tied, PEFT would change the embedding too: the adapter then stays beside it,
    as while it learnt.
    """
    base = _base(model)
    if folder is None:
        return base

    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = PeftModel.from_pretrained(base, str(folder))
        return peft_model if base.config.tie_word_embeddings else peft_model.merge_and_unload()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The most likely next tokens, each computed over the whole sequence."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(logits_of(model, ids)[-1].argmax()))

    return ids[len(prompt) :]


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    """(num_tokens, vocab_size)"""
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def _base(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _peft(model: Path, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(_base(model), LoraConfig(**settings))
