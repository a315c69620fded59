"""The facts of a model folder: what its config.json says.

A fault of the file is reported in one line that names it and the cause. This module knows nothing of weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from handlers.lmi_dist.families import Architecture, describe
from handlers.lmi_dist.model_types import check_config, class_name, unsupported
from handlers.lmi_dist.rotary import stable_context_length
from lmi.errors import ModelUnusable, cause_line


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts in the configuration of a folder, read once, before the weights."""

    path: str
    config: PretrainedConfig  # with every default filled in and old names replaced by new ones
    architecture: Architecture | None  # None: only the modules of transformers can run it
    vocab_size: int
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """The name of the model's class in transformers."""
        return _class_name(self.config)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the checkpoint, or None if its configuration has none."""
        return getattr(self.config, "dtype", None)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """The bytes of cache that one token needs over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_facts(path: str) -> ModelFacts:
    config = _read_config(path)
    for name in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(value := getattr(config, name, None), int) or value < 1:
            raise unsupported(path, f"{_class_name(config)} has no {name}: it does not run on attention alone")
    architecture = describe(config)
    num_heads = config.num_attention_heads
    return ModelFacts(
        path=path,
        config=config,
        architecture=architecture,
        vocab_size=config.vocab_size,
        context_length=architecture.context_length if architecture else stable_context_length(config),
        num_layers=config.num_hidden_layers,
        num_kv_heads=1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", num_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )


def _read_config(path: str) -> PretrainedConfig:
    file = existing_file(Path(path), "config.json")
    raw = read_json(file)
    if not raw.get("architectures"):
        raise ModelUnusable(f"{file}: no architectures, so this is not the configuration of a language model")
    check_config(file, raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises a different type for each way a file can be wrong
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error
    return config


def _class_name(config: PretrainedConfig) -> str:
    return class_name(config.architectures)


def existing_file(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise ModelUnusable(f"{folder}: the model folder does not exist")
    file = folder / name
    if not file.is_file():
        is_empty = not any(folder.iterdir())
        raise ModelUnusable(f"{folder}: the model folder is empty" if is_empty else f"{file}: missing")
    return file


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelUnusable(f"{file}: not JSON: {cause_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{file}: not a JSON object")
    return content
