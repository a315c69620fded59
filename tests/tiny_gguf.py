"""The checkpoints of `tiny_models.py` as GGUF files, by the rules of llama.cpp's converter."""

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from handlers.lmi_dist.facts import read_facts
from lmi.shared.gguf_file import ValueKind
from tests.gguf_files import Typed, Written, floats, write_gguf
from tests.tiny_models import tiny_model

# The numbers of a block.
BLOCK = 32
ARCHITECTURES = {
    "llama": "llama",
    "llama_bias": "llama",
    "llama_wide": "llama",
    "llama3": "llama",
    "llama_linear": "llama",
    "llama_yarn": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
PARTS = {
    "embed_tokens": "token_embd",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "norm": "output_norm",
    "final_layernorm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ln_2": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "dense": "attn_output",
    "qkv_proj": "attn_qkv",
    "c_attn": "attn_qkv",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "fc1": "ffn_up",
    "c_fc": "ffn_up",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "fc2": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# The types that gguf's own library writes.
TYPES_OF_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def write_tiny_gguf(
    family: str,
    file: Path,
    extra: dict[str, Any] | None = None,
    *,
    in_blocks: bool = False,
) -> Path:
    """Write the checkpoint of a family, and `extra` pairs of metadata.

    With `in_blocks` each weight is in blocks of the next type, but for those with rows of no whole
    blocks.
    """
    folder = tiny_model(family)
    kind = ARCHITECTURES[family]
    tensors = {
        name: floats(array)
        for name, array in _renamed(family, kind, load_file(folder / "model.safetensors")).items()
    }
    if in_blocks:
        tensors = _in_blocks(tensors)

    if family == "llama3":
        tensors["rope_freqs.weight"] = _factors(folder)
    return write_gguf(file, _metadata(family, kind, folder) | (extra or {}), tensors)


def _in_blocks(tensors: dict[str, Written]) -> dict[str, Written]:
    types = itertools.cycle(TYPES_OF_BLOCKS)
    written: dict[str, Written] = {}
    for name, tensor in tensors.items():
        is_weight = len(tensor.shape) == 2 and "position" not in name
        if not is_weight or tensor.shape[1] % BLOCK:
            written[name] = tensor
            continue

        kind = next(types)
        numbers = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        data = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
        written[name] = Written(kind, tensor.shape, data.tobytes())

    return written


def _factors(folder: Path) -> Written:
    """What divides the frequencies that the base alone gives."""
    facts = read_facts(str(folder))
    assert facts.architecture is not None and facts.architecture.rotaries[0] is not None
    scaled = np.array(facts.architecture.rotaries[0].frequencies)
    plain = 10_000.0 ** -(np.arange(len(scaled)) / len(scaled))
    return floats(plain / scaled)


def _renamed(family: str, kind: str, arrays: dict[str, Any]) -> dict[str, Any]:
    config = json.loads((tiny_model(family) / "config.json").read_text())
    heads = {
        "attn_q": config.get("num_attention_heads"),
        "attn_k": config.get("num_key_value_heads"),
    }
    renamed: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, module, suffix = name.split(".")
        layer = next((word for word in path if word.isdecimal()), None)
        part = PARTS.get(module) or ("attn_output" if "attn" in path else "ffn_down")
        if module == "post_attention_layernorm" and kind in ("gemma2", "gemma3"):
            part = "post_attention_norm"

        if kind == "llama" and part in heads:
            halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)

        if kind.startswith("gemma") and part.endswith("norm"):
            array = array + np.float32(1)

        if kind == "gpt2" and layer is not None and array.ndim == 2:
            array = array.T

        renamed[f"blk.{layer}.{part}.{suffix}" if layer is not None else f"{part}.{suffix}"] = array

    if kind == "phi2":
        for layer in range(config["num_hidden_layers"]):
            for suffix in ("weight", "bias"):
                parts = [renamed.pop(f"blk.{layer}.attn_{p}.{suffix}") for p in "qkv"]
                renamed[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(parts)

    return renamed


def _metadata(family: str, kind: str, folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    hidden_size = config.get("hidden_size", config.get("n_embd"))
    metadata = {
        "general.architecture": kind,
        f"{kind}.context_length": config.get("max_position_embeddings", config.get("n_positions")),
        f"{kind}.embedding_length": hidden_size,
        f"{kind}.block_count": config.get("num_hidden_layers", config.get("n_layer")),
        f"{kind}.feed_forward_length": config.get("intermediate_size", 4 * hidden_size),
        f"{kind}.attention.head_count": config.get("num_attention_heads", config.get("n_head")),
    }

    if kind in ("gpt2", "phi2"):
        metadata[f"{kind}.attention.layer_norm_epsilon"] = Typed(ValueKind.FLOAT64, 1e-5)
    else:
        epsilon = Typed(ValueKind.FLOAT64, config["rms_norm_eps"])
        metadata[f"{kind}.attention.layer_norm_rms_epsilon"] = epsilon

    if "num_key_value_heads" in config:
        metadata[f"{kind}.attention.head_count_kv"] = config["num_key_value_heads"]

    if "head_dim" in config:
        metadata[f"{kind}.attention.key_length"] = config["head_dim"]
        metadata[f"{kind}.attention.value_length"] = config["head_dim"]

    if kind == "phi2":
        metadata["phi2.rope.dimension_count"] = hidden_size // config["num_attention_heads"] // 2

    if kind == "gemma3":
        metadata["gemma3.rope.freq_base"] = 1e6
        metadata["gemma3.attention.sliding_window_pattern"] = 2

    if kind in ("gemma2", "gemma3"):
        metadata[f"{kind}.attention.sliding_window"] = config["sliding_window"]

    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") in ("linear", "yarn"):
        metadata[f"{kind}.rope.scaling.type"] = rope["rope_type"]
        metadata[f"{kind}.rope.scaling.factor"] = rope["factor"]

    if rope.get("rope_type") == "yarn":
        length = rope["original_max_position_embeddings"]
        metadata[f"{kind}.rope.scaling.original_context_length"] = length

    return metadata
