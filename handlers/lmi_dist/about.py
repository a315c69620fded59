"""The Handler record of the embedded engine. This module imports none of the engine's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from handlers.lmi_dist import lora_limits, model_types
from handlers.lmi_dist.native import variants
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Auto, Handler
from lmi.settings.options import ENGINE_KEYS

MAX_NUM_SEQUENCES = 64
MAX_PREFILL_TOKENS = 1024
ONE_DEVICE = "1 on lmi-dist, which runs on one device; more with option.rolling_batch=vllm, once installed"
DRAFT_KEYS = ("option.speculative_draft_model", "option.speculative_config")
OWN_KEYS = frozenset({"option.disable_any_whitespace", *(f"option.{name}" for name in lora_limits.KINDS)})


def check(config: EngineConfig) -> Mapping[str, str]:
    faults = {}
    if config.quantize not in (None, "int8"):
        faults["option.quantize"] = "int8 on lmi-dist, more with option.rolling_batch=vllm"
    if config.tensor_parallel_degree > 1:
        faults["option.tensor_parallel_degree"] = ONE_DEVICE
    elif config.pipeline_parallel_degree > 1:
        faults["option.pipeline_parallel_degree"] = ONE_DEVICE
    return faults


def dtypes(config: EngineConfig, stored: str) -> tuple[str, str]:
    """Dtypes of weights and of keys and values on a CPU, where only torch knows a cache in bfloat16.

    The native kernels keep the bfloat16 weights of a checkpoint. They are taken to know the model.
    """
    weights = "bf16" if config.dtype == "bf16" else "fp32"
    if variants.of_this_cpu() not in variants.built():
        return weights, weights
    return ("bf16" if config.dtype == "auto" and stored == "bfloat16" else weights), "fp32"


HANDLER = Handler(
    load="handlers.lmi_dist:load",
    auto=Auto.ELSEWHERE,
    other_names=("scheduler",),
    is_one_device=True,
    defaults={
        "option.max_rolling_batch_size": MAX_NUM_SEQUENCES,
        "option.max_rolling_batch_prefill_tokens": MAX_PREFILL_TOKENS,
    },
    uses=frozenset({"option.max_step_ms", "option.speculative"}),
    unused=dict.fromkeys(ENGINE_KEYS.keys() - OWN_KEYS, "")
    | dict.fromkeys(DRAFT_KEYS, "option.speculative=ngram guesses without a second model"),
    demo=Path(__file__).parent / "demo",
    check=check,
    check_model=model_types.check,
    dtypes=dtypes,
    environment=lambda *_: {"OPENBLAS_NUM_THREADS": "1"},  # numpy would start a thread for each core, for nothing
    describe=variants.describe,
)
