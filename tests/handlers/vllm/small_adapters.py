"""LoRA adapters for the small Llama, written in the form that PEFT saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANK = 4
ALPHA = 8
HIDDEN_SIZE = 96
NUM_LAYERS = 2
OUT_FEATURES = {"q_proj": 128, "v_proj": 64}
# Of the weights; enough to change most tokens
WIDTH = 0.3


def write_adapter(folder: Path, seed: int, rank: int = RANK) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted(OUT_FEATURES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        for module, out_features in OUT_FEATURES.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{stem}.lora_A.weight"] = (
                torch.randn(rank, HIDDEN_SIZE, generator=generator) * WIDTH
            )
            weights[f"{stem}.lora_B.weight"] = (
                torch.randn(out_features, rank, generator=generator) * WIDTH
            )

    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def merged(model: Any, folder: Path) -> Any:
    """Return a model of transformers with the adapter's products added to its weights."""
    from safetensors.torch import load_file

    weights = load_file(folder / "adapter_model.safetensors")
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    for layer in range(NUM_LAYERS):
        for module in OUT_FEATURES:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            product = weights[f"{stem}.lora_B.weight"] @ weights[f"{stem}.lora_A.weight"]
            weight = getattr(model.model.layers[layer].self_attn, module).weight
            weight.data += product * (ALPHA / rank)

    return model
