"""The checkpoints of `tiny_models.py` quantised to the nearest number, in the layouts of AWQ, GPTQ
and compressed-tensors.

The encoder is written from the descriptions of the layouts, and shares nothing with the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_model

Arrays = dict[str, npt.NDArray[Any]]
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FAMILY = "llama_wide"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Variant:
    """A way to quantise a checkpoint, and what the engine says of its weights."""

    layout: str
    num_bits: int = 4
    # -1: all inputs share a scale
    group_size: int = 32
    is_symmetric: bool = False
    # Groups of inputs that are no neighbours: "", "inputs", or "blocks" of 32
    order: str = ""
    scale_dtype: torch.dtype = torch.float16
    is_of_tensor: bool = False
    has_head: bool = False
    dtype: str = "4-bit blocks"
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Numbers:
    """A weight (num_out, num_in) in whole numbers without a sign."""

    codes: npt.NDArray[np.int64]
    # (num_out, num_groups), both
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]

    @property
    def floats(self) -> npt.NDArray[np.float32]:
        steps = self.codes - self.zeros[:, self.groups]
        return steps.astype(np.float32) * self.scales[:, self.groups]


def quantise(weight: npt.NDArray[np.float32], variant: Variant, seed: int = 0) -> Numbers:
    num_out, num_in = weight.shape
    groups = _groups(num_in, variant, seed)
    num_groups = int(groups.max()) + 1
    top = 2**variant.num_bits - 1
    middle = 2 ** (variant.num_bits - 1)

    scales = np.zeros((num_out, num_groups), np.float32)
    zeros = np.full((num_out, num_groups), middle)
    for group in range(num_groups):
        members = weight[:, groups == group]
        low = np.minimum(members.min(axis=1), 0)
        high = np.maximum(members.max(axis=1), 0)
        if variant.is_symmetric:
            scales[:, group] = rounded(np.maximum(high, -low) / (middle - 1), variant)
        else:
            scales[:, group] = rounded((high - low) / top, variant)
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, top)

    if variant.is_of_tensor:
        scales[:] = scales.max()

    steps = np.round(weight / scales[:, groups]).astype(np.int64)
    codes = np.clip(steps + zeros[:, groups], 0, top)
    return Numbers(codes, scales, zeros, groups)


def rounded(scales: npt.NDArray[np.float32], variant: Variant) -> npt.NDArray[np.float32]:
    """Scales as the file has them, in float32."""
    array: npt.NDArray[np.float32] = (
        torch.from_numpy(scales).to(variant.scale_dtype).float().numpy()
    )
    return array


def _groups(num_in: int, variant: Variant, seed: int) -> npt.NDArray[np.int64]:
    size = num_in if variant.group_size == -1 else variant.group_size
    dice = np.random.default_rng(seed)
    places = np.arange(num_in)
    if variant.order == "inputs":
        places = dice.permutation(num_in)
    elif variant.order == "blocks":
        # The last blocks come first
        places = places[::-1] // 32 * 32

    return places // size


def packed(
    numbers: npt.NDArray[np.int64], num_bits: int, order: tuple[int, ...] | None = None
) -> npt.NDArray[np.int32]:
    """Words of the numbers of each row, the lowest bits first."""
    per_word = 32 // num_bits
    rows, width = numbers.shape
    padded = np.zeros((rows, -(-width // per_word) * per_word), np.uint32)
    padded[:, :width] = numbers
    words = np.zeros((rows, padded.shape[1] // per_word), np.uint32)
    for place, column in enumerate(order or range(per_word)):
        words |= padded[:, column::per_word] << np.uint32(num_bits * place)

    return words.view(np.int32)


def awq(numbers: Numbers, variant: Variant) -> Arrays:
    return {
        "qweight": packed(numbers.codes.T, 4, AWQ_ORDER),
        "qzeros": packed(numbers.zeros.T, 4, AWQ_ORDER),
        "scales": numbers.scales.T,
    }


def gptq(numbers: Numbers, variant: Variant) -> Arrays:
    zeros = packed(numbers.zeros.T, variant.num_bits).view(np.uint32)
    if variant.layout == "gptq":
        ones = packed(np.ones((1, 32 // variant.num_bits), np.int64), variant.num_bits)
        zeros = zeros - ones.view(np.uint32)

    return {
        "qweight": packed(numbers.codes, variant.num_bits).T,
        "qzeros": zeros.view(np.int32),
        "scales": numbers.scales.T,
        "g_idx": numbers.groups.astype(np.int32),
    }


def pack_quantized(numbers: Numbers, variant: Variant) -> Arrays:
    parts = {
        "weight_packed": packed(numbers.codes, variant.num_bits),
        "weight_shape": np.array(numbers.codes.shape, np.int64),
        "weight_scale": numbers.scales,
    }
    if not variant.is_symmetric:
        parts["weight_zero_point"] = packed(numbers.zeros.T, variant.num_bits).T

    if variant.order:
        parts["weight_g_idx"] = numbers.groups.astype(np.int32)

    return parts


def int_quantized(numbers: Numbers, variant: Variant) -> Arrays:
    middle = 2 ** (variant.num_bits - 1)
    scales = numbers.scales[:1, 0] if variant.is_of_tensor else numbers.scales
    parts = {"weight": (numbers.codes - middle).astype(np.int8), "weight_scale": scales}
    if not variant.is_symmetric:
        parts["weight_zero_point"] = (numbers.zeros - middle).astype(np.int8)

    return parts


ENCODERS: dict[str, Callable[[Numbers, Variant], Arrays]] = {
    "gemm": awq,
    "gptq": gptq,
    "gptq_v2": gptq,
    "pack-quantized": pack_quantized,
    "int-quantized": int_quantized,
}


def quantization_config(variant: Variant) -> dict[str, Any]:
    if variant.layout == "gemm":
        config = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": variant.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    elif variant.layout.startswith("gptq"):
        config = {
            "quant_method": "gptq",
            "bits": variant.num_bits,
            "group_size": variant.group_size,
            "desc_act": bool(variant.order),
            "sym": variant.is_symmetric,
            "checkpoint_format": variant.layout,
            "lm_head": variant.has_head,
        }
    else:
        config = _config_of_compressed_tensors(variant)

    return config | variant.more


def _config_of_compressed_tensors(variant: Variant) -> dict[str, Any]:
    strategy = "channel" if variant.group_size == -1 else "group"
    if variant.is_of_tensor:
        strategy = "tensor"

    weights = {
        "num_bits": variant.num_bits,
        "type": "int",
        "symmetric": variant.is_symmetric,
        "strategy": strategy,
        "group_size": None if variant.group_size == -1 else variant.group_size,
        "actorder": "group" if variant.order else None,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if variant.layout == "int-quantized" else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": variant.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [] if variant.has_head else ["lm_head"],
    }


def quantised_model(folder: Path, variant: Variant, family: str = FAMILY) -> tuple[Path, Path]:
    """Make a quantised checkpoint, and one of the floats that its numbers are."""
    return quantised_folder(tiny_model(family), folder, variant, is_turned=family == "gpt2")


def quantised_folder(
    source: Path, folder: Path, variant: Variant, *, is_turned: bool = False
) -> tuple[Path, Path]:
    """Make both of a checkpoint in float32 or bfloat16, whose linears may be (num_in, num_out)."""
    quantised = Path(shutil.copytree(source, folder / "quantised"))
    floats = Path(shutil.copytree(source, folder / "floats"))
    tensors = _floats_of(floats / WEIGHTS)
    parts: Arrays = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if not _is_quantised(name, tensor, variant):
            parts[name] = tensor
            continue

        numbers = quantise(tensor.T if is_turned else tensor, variant, seed)
        tensors[name] = numbers.floats.T if is_turned else numbers.floats
        path = name.removesuffix(".weight")
        for part, array in ENCODERS[variant.layout](numbers, variant).items():
            parts[f"{path}.{part}"] = array

    write(floats, tensors)
    write(quantised, parts, variant.scale_dtype)
    config = json.loads((quantised / CONFIG).read_text())
    config["quantization_config"] = quantization_config(variant)
    (quantised / CONFIG).write_text(json.dumps(config))
    return quantised, floats


def _floats_of(file: Path) -> Arrays:
    return {name: tensor.float().numpy() for name, tensor in load_file(file).items()}


def write(folder: Path, arrays: Arrays, scale_dtype: torch.dtype = torch.float16) -> None:
    """Write the weights of a folder, scales in a dtype of their own."""
    tensors: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        is_scale = name.endswith((".scales", ".weight_scale"))
        tensors[name] = tensor.to(scale_dtype) if is_scale else tensor

    save_file(tensors, folder / WEIGHTS)


def _is_quantised(name: str, tensor: npt.NDArray[Any], variant: Variant) -> bool:
    is_linear = tensor.ndim == 2 and name.endswith(".weight")
    if name == "lm_head.weight":
        return variant.has_head

    is_table = any(word in name for word in ("embed", "wte", "wpe"))
    return is_linear and not is_table
