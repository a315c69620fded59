"""The Handler record of the embedded engine: its options of adapters, with vLLM's names, and its
kernels for this CPU.

This module imports none of the engine's libraries.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers.lmi_dist.config_file import check as check_model
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Auto, Handler, folder_of
from lmi.settings.kinds import BOOLEAN, Kind, integer
from lmi.settings.other_names import ENGINE_KEYS

MAX_NUM_SEQUENCES = (
    64  # where no option says it: fewer, if they make as many tokens on this machine
)
MAX_PREFILL_TOKENS = 1024
ONE_DEVICE = (
    "1 on lmi-dist, which runs on one device; more with option.rolling_batch=vllm, once installed"
)
QUANTIZE_METHODS = frozenset({"int8"})
DRAFT_KEYS = ("option.speculative_draft_model", "option.speculative_config")
LORA_KINDS: dict[str, Kind] = {
    "enable_lora": BOOLEAN,
    "max_loras": integer(1, 1024),
    "max_lora_rank": integer(1, 1024),
    "max_cpu_loras": integer(1),
}
OWN_KINDS = LORA_KINDS | {
    "disable_any_whitespace": BOOLEAN
}  # the last is vLLM's name for JSON without spaces
OWN_KEYS = frozenset(f"option.{name}" for name in OWN_KINDS)
LIBRARIES = Path(__file__).parent / "native"
PREFIX = "lmi_kernels-"
SUFFIX = ".so"
X86_64_V3 = frozenset("avx2 bmi1 bmi2 fma f16c abm movbe".split())  # as /proc/cpuinfo names them
X86_64_V4 = X86_64_V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


def own_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The values of OWN_KINDS that are given. Raises BadConfiguration with a line for
    each fault.
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
    max_in_batch: int = 4  # adapters that the running sequences use together
    max_rank: int = 16
    max_in_memory: int | None = None  # adapters whose weights stay; None: all that are loaded

    @staticmethod
    def of(options: Mapping[str, str]) -> "LoraLimits | None":
        """The limits that the options of an engine give, or None if they do not enable adapters."""
        values = own_options(options)
        if not values.get("enable_lora"):
            return None

        num_kept = values.get("max_cpu_loras")
        # A default gives way to what is given.
        usual = (
            LoraLimits.max_in_batch if num_kept is None else min(LoraLimits.max_in_batch, num_kept)
        )
        num_each = values.get("max_loras", usual)
        if num_kept is not None and num_kept < num_each:
            raise BadConfiguration(
                f"option.max_cpu_loras={num_kept}: allowed is at least option.max_loras, {num_each}"
            )

        return LoraLimits(num_each, values.get("max_lora_rank", LoraLimits.max_rank), num_kept)


def check(config: EngineConfig) -> Mapping[str, str]:
    faults = {}
    if config.quantize is not None and config.quantize not in QUANTIZE_METHODS:
        faults["option.quantize"] = "int8 on lmi-dist, more with option.rolling_batch=vllm"

    if config.device == "cuda" and folder_of("torch") is None:
        faults["option.device"] = "auto or cpu, since the library torch is not installed"

    if config.tensor_parallel_degree > 1:
        faults["option.tensor_parallel_degree"] = ONE_DEVICE
    elif config.pipeline_parallel_degree > 1:
        faults["option.pipeline_parallel_degree"] = ONE_DEVICE

    return faults


# The variants of the native library: those that are built, and the one that a CPU takes.


def library_file(variant: str, folder: Path = LIBRARIES) -> Path:
    return folder / f"{PREFIX}{variant}{SUFFIX}"


def built_variants(folder: Path = LIBRARIES) -> list[str]:
    names = (file.name for file in folder.glob(f"{PREFIX}*{SUFFIX}"))
    return sorted(name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in names)


def variant_here() -> str | None:
    """The variant that this CPU takes, or None where there is none for it."""
    if platform.system() != "Linux":
        return None

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []

    flags = next(
        (line.partition(":")[2] for line in lines if line.startswith("flags")), ""
    )  # of the first core
    return variant_of(platform.machine(), frozenset(flags.split()))


def variant_of(machine: str, flags: frozenset[str]) -> str | None:
    """The variant for a machine, as `uname -m` names it, with these features."""
    if machine == "aarch64":
        return "aarch64"

    if machine != "x86_64":
        return None

    return "x86-64-v4" if flags >= X86_64_V4 else "x86-64-v3" if flags >= X86_64_V3 else None


def describe_kernels(folder: Path = LIBRARIES, wanted: str | None = None) -> str:
    """What computes on this CPU, or on one that takes `wanted`, and which variants are built."""
    wanted, names = wanted or variant_here(), built_variants(folder)
    there = f"built: {', '.join(names) or 'none'}"
    if wanted is None:
        return f"kernels torch ({there}; none is for this CPU)"

    return (
        f"kernels native {wanted} ({there})"
        if wanted in names
        else f"kernels torch ({there}; this CPU: {wanted})"
    )


def dtypes(config: EngineConfig, stored: str) -> tuple[str, str]:
    """Dtypes of weights and of keys and values on a CPU, where only torch knows a cache in
    bfloat16.

    The native kernels keep the bfloat16 weights of a checkpoint. They are taken to know the model.
    """
    weights = "bf16" if config.dtype == "bf16" else "fp32"
    if variant_here() not in built_variants():
        return weights, weights

    return ("bf16" if config.dtype == "auto" and stored == "bfloat16" else weights), "fp32"


HANDLER = Handler(
    load="handlers.lmi_dist.executor:load",
    auto=Auto.ELSEWHERE,
    other_names=("scheduler",),
    is_one_device=True,
    quantize_methods=QUANTIZE_METHODS,
    defaults={
        "option.max_rolling_batch_size": MAX_NUM_SEQUENCES,
        "option.max_rolling_batch_prefill_tokens": MAX_PREFILL_TOKENS,
    },
    uses=frozenset({"option.max_step_ms", "option.speculative", "option.kv_events_config"}),
    unused=dict.fromkeys(ENGINE_KEYS.keys() - OWN_KEYS, "")
    | dict.fromkeys(DRAFT_KEYS, "option.speculative=ngram guesses without a second model"),
    demo=Path(__file__).parent / "demo",
    ignores_unknown=True,
    check=check,
    check_model=check_model,
    dtypes=dtypes,
    environment=lambda *_: {
        "OPENBLAS_NUM_THREADS": "1"
    },  # numpy would start a thread for each core, for nothing
    describe=describe_kernels,
)
