"""The device and the dtype of a model, chosen once, at load."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of weights and cache, and their dtype."""

    device: torch.device
    dtype: torch.dtype


def choose_placement(config: EngineConfig, checkpoint_dtype: torch.dtype | None) -> Placement:
    device = _choose_device(config)
    return Placement(device, choose_dtype(config, device, checkpoint_dtype))


def _choose_device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise BadConfiguration("option.device=cuda, but torch sees no CUDA device here; use cpu or auto")
    device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    if config.quantize is not None and (config.quantize != "int8" or device.type != "cpu"):
        raise BadConfiguration(f"option.quantize={config.quantize} on {device.type}: only int8 on cpu is built")
    return device


def choose_dtype(config: EngineConfig, device: torch.device, checkpoint_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of weights and cache.

    On CUDA `auto` is the dtype of the checkpoint. On a CPU it is float32: batch invariance holds only for float32, and
    without bf16 instructions bf16 is up to three times slower. With such instructions (measured on AMD Zen 4, 135M
    parameters) a bf16 step takes 0.6 to 0.7 of the time, so a bf16 checkpoint stays bf16 if invariance is switched off.
    """
    if device.type == "cuda":
        return _DTYPES.get(config.dtype) or checkpoint_dtype or torch.float32
    if config.quantize == "int8":
        return torch.float32  # of activations and cache: the int8 kernels take only float32
    if config.dtype == "fp16":
        log.warning("float32 instead of float16: this CPU has no arithmetic for it")
        return torch.float32
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    is_bf16_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    may_be_bf16 = is_bf16_fast and not config.batch_invariant and checkpoint_dtype == torch.bfloat16
    return torch.bfloat16 if may_be_bf16 else torch.float32
