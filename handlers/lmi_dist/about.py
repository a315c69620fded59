"""The Handler record of the embedded engine, and its options of adapters, with vLLM's names.

This module imports none of the engine's libraries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers.lmi_dist.config_file import check as check_model
from handlers.lmi_dist.native_variants import (
    ROUNDING_VARIANTS,
    built_variants,
    describe_kernels,
    variant_here,
)
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Auto, Handler, folder_of
from lmi.settings.kinds import BOOLEAN, Kind, integer
from lmi.settings.other_names import ENGINE_KEYS

# Without an option. There are fewer if they make as many tokens on this machine.
MAX_NUM_SEQUENCES = 64
MAX_PREFILL_TOKENS = 1024
ONE_DEVICE = (
    "1 on lmi-dist, which runs on one device; more with option.rolling_batch=vllm, once installed"
)
QUANTIZE_METHODS = frozenset({"int4", "int8"})
DRAFT_KEYS = ("option.speculative_draft_model", "option.speculative_config")
LORA_KINDS: dict[str, Kind] = {
    "enable_lora": BOOLEAN,
    "max_loras": integer(1, 1024),
    "max_lora_rank": integer(1, 1024),
    "max_cpu_loras": integer(1),
}
# The last is vLLM's name for JSON without spaces.
OWN_KINDS = LORA_KINDS | {"disable_any_whitespace": BOOLEAN}
OWN_KEYS = frozenset(f"option.{name}" for name in OWN_KINDS)


def own_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The values of OWN_KINDS that are given.

    Raises BadConfiguration with a line for each fault.
    """
    values = {}
    faults = []
    for name in OWN_KINDS.keys() & options.keys():
        try:
            values[name] = OWN_KINDS[name].parse(options[name])
        except ValueError:
            faults.append(f"option.{name}={options[name]}: allowed is {OWN_KINDS[name].allowed}")

    if faults:
        raise BadConfiguration("\n".join(sorted(faults)))

    return values


@dataclass(frozen=True)
class LoraLimits:
    """How many adapters there may be, and how large."""

    # Adapters that the running sequences use together.
    max_in_batch: int = 4
    max_rank: int = 16
    # Adapters whose weights stay. None: all that are loaded.
    max_in_memory: int | None = None

    @staticmethod
    def of(options: Mapping[str, str]) -> "LoraLimits | None":
        """The limits that the options of an engine give, or None if they do not enable adapters."""
        values = own_options(options)
        if not values.get("enable_lora"):
            return None

        max_in_memory = values.get("max_cpu_loras")
        max_in_batch = LoraLimits.max_in_batch
        if "max_loras" in values:
            max_in_batch = values["max_loras"]
        elif max_in_memory is not None:
            # A default gives way to an option.
            max_in_batch = min(max_in_batch, max_in_memory)

        if max_in_memory is not None and max_in_memory < max_in_batch:
            raise BadConfiguration(
                f"option.max_cpu_loras={max_in_memory}: "
                f"allowed is at least option.max_loras, {max_in_batch}"
            )

        max_rank = values.get("max_lora_rank", LoraLimits.max_rank)
        return LoraLimits(max_in_batch, max_rank, max_in_memory)


def check(config: EngineConfig) -> Mapping[str, str]:
    """Return what is wrong with options for this engine: by the option what is allowed."""
    faults = {}
    if config.quantize is not None and config.quantize not in QUANTIZE_METHODS:
        faults["option.quantize"] = "int4 or int8 on lmi-dist, more with option.rolling_batch=vllm"

    if config.device == "cuda" and folder_of("torch") is None:
        faults["option.device"] = "auto or cpu, since the library torch is not installed"

    if config.tensor_parallel_degree > 1:
        faults["option.tensor_parallel_degree"] = ONE_DEVICE
    elif config.pipeline_parallel_degree > 1:
        faults["option.pipeline_parallel_degree"] = ONE_DEVICE

    return faults


def dtypes(config: EngineConfig, stored: str) -> tuple[str, str]:
    """Dtypes of weights and of keys and values on a CPU.

    The native kernels keep the bfloat16 weights of a checkpoint; keys and values are bfloat16 where
    they multiply it. They are taken to know the model.
    """
    weights = "bf16" if config.dtype == "bf16" else "fp32"
    variant = variant_here()
    if variant not in built_variants():
        return weights, weights

    if config.dtype == "auto" and stored == "bfloat16":
        weights = "bf16"

    return weights, weights if variant in ROUNDING_VARIANTS else "fp32"


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
