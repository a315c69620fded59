"""The Handler record of the embedded engine.

This module imports none of the engine's libraries.
"""

from collections.abc import Mapping
from pathlib import Path

from handlers.lmi_dist.config_file import check as check_model
from handlers.lmi_dist.defaults import MAX_NUM_SEQUENCES, MAX_PREFILL_TOKENS, QUANTIZE_METHODS
from handlers.lmi_dist.lora_limits import OWN_KEYS
from handlers.lmi_dist.native_variants import (
    ROUNDING_VARIANTS,
    built_variants,
    describe_kernels,
    variant_here,
)
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Auto, Handler, folder_of
from lmi.settings.other_names import ENGINE_KEYS

ONE_DEVICE = (
    "1 on lmi-dist, which runs on one device; more with option.rolling_batch=vllm, once installed"
)
DRAFT_KEYS = ("option.speculative_draft_model", "option.speculative_config")


def check(config: EngineConfig) -> Mapping[str, str]:
    """Return what is wrong with options for this engine: by the option what is allowed."""
    faults = {}
    if config.quantize is not None and config.quantize not in QUANTIZE_METHODS:
        faults["option.quantize"] = "int4 or int8 on lmi-dist, more with option.rolling_batch=vllm"

    if config.device == "cuda" and folder_of("torch") is None:
        faults["option.device"] = "auto or cpu, since the library torch is not installed"

    if config.tensor_parallel_degree > 1:
        faults["option.tensor_parallel_degree"] = ONE_DEVICE

    if config.pipeline_parallel_degree > 1:
        faults["option.pipeline_parallel_degree"] = ONE_DEVICE

    return faults


def dtypes(config: EngineConfig, stored: str) -> tuple[str, str]:
    """Return the dtype of the weights, and that of keys and values, on a CPU.

    `stored` is the dtype of the checkpoint. Where the native kernels run, weights that are stored
    as bfloat16 stay so. Keys and values are bfloat16 where weights are and these kernels multiply
    in bfloat16 (ROUNDING_VARIANTS); else they are fp32.
    """
    weights = "bf16" if config.dtype == "bf16" else "fp32"
    variant = variant_here()
    if variant not in built_variants():
        return weights, weights

    if config.dtype == "auto" and stored == "bfloat16":
        weights = "bf16"

    cache = weights if variant in ROUNDING_VARIANTS else "fp32"
    return weights, cache


HANDLER = Handler(
    load="handlers.lmi_dist.executor:load",
    auto=Auto.ELSEWHERE,
    other_names=("scheduler",),
    is_one_device=True,
    reads_gguf=True,
    quantize_methods=QUANTIZE_METHODS,
    defaults={
        "option.max_rolling_batch_size": MAX_NUM_SEQUENCES,
        "option.max_rolling_batch_prefill_tokens": MAX_PREFILL_TOKENS,
    },
    uses=frozenset(
        (
            "option.max_step_ms",
            "option.speculative",
            "option.kv_events_config",
            "option.prefix_cache_dir",
            "option.max_prefix_cache_disk",
            "option.idle_cache_timeout",
        )
    ),
    unused=dict.fromkeys(ENGINE_KEYS.keys() - OWN_KEYS, "")
    | dict.fromkeys(DRAFT_KEYS, "option.speculative=ngram guesses without a second model"),
    demo=Path(__file__).parent / "demo",
    ignores_unknown=True,
    check=check,
    check_model=check_model,
    dtypes=dtypes,
    # numpy would start a thread for each core, for nothing.
    environment=lambda *_: {"OPENBLAS_NUM_THREADS": "1"},
    describe=describe_kernels,
)
