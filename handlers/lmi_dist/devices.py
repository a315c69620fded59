"""The device of a model: a GPU where torch sees one, else the CPU; and how its errors of exhausted memory are known.

torch is imported only where there may be a GPU.
"""

from __future__ import annotations

import logging
import os

from handlers.lmi_dist.model_types import INSTALL_TORCH
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import folder_of
from lmi.settings.machine import Machine

log = logging.getLogger(__name__)


def choose_device(config: EngineConfig) -> str:
    """ "cuda" or "cpu"; raises BadConfiguration if the configuration wants what is not there."""
    device = "cuda" if config.device != "cpu" and _has_cuda(config) else "cpu"
    if config.quantize is not None and (config.quantize != "int8" or device != "cpu"):
        raise BadConfiguration(f"option.quantize={config.quantize} on {device}: only int8 on cpu is built")
    return device


def _has_cuda(config: EngineConfig) -> bool:
    is_wanted = config.device == "cuda"
    if not is_wanted and not Machine.here(os.environ).gpus:
        return False
    if folder_of("torch") is None:
        if is_wanted:
            raise BadConfiguration(f"option.device=cuda needs torch, which is not installed: {INSTALL_TORCH}")
        log.warning("the CPU computes although a GPU is here: without torch lmi-dist cannot use it; %s", INSTALL_TORCH)
        return False
    import torch

    if not torch.cuda.is_available() and is_wanted:
        raise BadConfiguration("option.device=cuda, but torch sees no CUDA device here; use cpu or auto")
    return torch.cuda.is_available()
