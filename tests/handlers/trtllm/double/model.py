"""A small deterministic model: the logits after some tokens are a function of the last few of them.

It reads the width of the vocabulary, the context length and the end tokens from a model's folder,
and no weights. Each row is computed for itself, so neighbours in a batch change no bit of it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

# Of the hidden state
WIDTH = 24
# Tokens on which the next one depends
NUM_RECENT = 6
# Of the logits: the best token is clear, and others are drawn too
SCALE = 0.8
MAX_ADAPTER_SCALE = 4.0
KNOWN = (
    "Llama",
    "Mistral",
    "Mixtral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Phi",
    "Phi3",
    "DeepseekV3",
)


class Model:
    """`vocab_size`, `context_length` and `end_ids` are read from the folder."""

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "config.json", is_needed=True)
        _check_architecture(config)
        config = config.get("text_config", config)
        self.vocab_size: int = config["vocab_size"]
        self.context_length: int = config.get("max_position_embeddings", 2048)
        self.hidden_size = WIDTH
        generator = torch.Generator().manual_seed(self.vocab_size)
        self._tokens = torch.randn(self.vocab_size, WIDTH, generator=generator)
        self._places = torch.randn(NUM_RECENT, WIDTH, generator=generator)
        self._head = torch.randn(self.vocab_size, WIDTH, generator=generator) * SCALE

    def hidden_state(self, tokens: Sequence[int]) -> Tensor:
        """The hidden state (WIDTH,) behind some tokens, of which there is at least one."""
        recent = torch.tensor(tokens[-NUM_RECENT:])
        return torch.tanh((self._tokens[recent] * self._places[-len(recent) :]).sum(0))

    def logits(self, tokens: Sequence[int], adapter: Tensor | None = None) -> Tensor:
        """The logits (vocab_size,) of the next token, float32, in new memory."""
        row = self._head @ self.hidden_state(tokens)
        return row if adapter is None else row + adapter


def read_adapter(folder: Path, max_rank: int, vocab_size: int) -> Tensor:
    """What a LoRA adapter adds to the logits, (vocab_size,): zeros if its weights are. Raises if it
    does not fit.
    """
    config = _read_json(folder / "adapter_config.json", is_needed=True)
    if config["r"] > max_rank:
        raise ValueError(f"LoRA rank {config['r']} is greater than max_lora_rank {max_rank}")

    weights = load_file(folder / "adapter_model.safetensors")
    size = sum(float(weight.abs().mean()) for name, weight in weights.items() if "lora_B" in name)
    digest = zlib.crc32(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
    noise = torch.randn(vocab_size, generator=torch.Generator().manual_seed(digest))
    return noise * min(MAX_ADAPTER_SCALE, 10 * size)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder, or None if there is none, which upstream only warns of."""
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def end_id_of(folder: Path) -> int | None:
    """The end token of a model's tokenizer, or of its configuration."""
    eos_token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = eos_token["content"] if isinstance(eos_token, dict) else eos_token
    tokenizer = read_tokenizer(folder)
    if text and tokenizer is not None and (token_id := tokenizer.token_to_id(text)) is not None:
        return token_id

    eos_ids = _read_json(folder / "config.json").get("eos_token_id")
    return eos_ids[0] if isinstance(eos_ids, list) else eos_ids


def _check_architecture(config: dict[str, Any]) -> None:
    [architecture] = config.get("architectures") or ["none"]
    if (
        architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        not in KNOWN
    ):
        raise ValueError(f"Unknown architecture for AutoModelForCausalLM: {architecture}")


def _read_json(path: Path, *, is_needed: bool = False) -> dict[str, Any]:
    if not is_needed and not path.is_file():
        return {}

    content: dict[str, Any] = json.loads(path.read_text())
    return content
