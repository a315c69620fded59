"""What code for AWS's vLLM image imports from vllm to call the engine, where vLLM itself is not
installed.

Source: vLLM's documentation of sampling parameters, and AWS's examples.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        return import_module(f"{__name__}.sampling_params").SamplingParams

    raise ImportError(
        f"vllm.{name} is not here: vLLM is not installed, and only SamplingParams and LoRARequest "
        "stand for it"
    )
