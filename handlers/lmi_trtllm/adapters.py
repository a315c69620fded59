"""LoRA adapters as TensorRT-LLM has them: it reads one when a request names it, and no call adds or
removes one.

So an adapter is read by a request for one token. What the engine would leave out of an adapter,
with no more than a line in its log, is refused here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from safetensors import SafetensorError, safe_open
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import LoRARequest, TorchLlmArgs

from handlers.base.adapters import LoadedAdapter
from handlers.lmi_trtllm.sampling import beam_search
from lmi.adapters.files import CONFIG, WEIGHTS
from lmi.errors import Unsupported, shorten
from lmi.executor import SamplingConfig

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm_args import LoraConfig
else:
    # Its module has moved, so the argument that takes one says which class it is.
    LoraConfig = get_args(TorchLlmArgs.model_fields["lora_config"].annotation)[0]

NO_PIN = (
    "TensorRT-LLM pins no adapter; those that were used last stay, as many as option.max_loras says"
)
WAY_OUT = '(option.lora_config={"trtllm_modules_to_hf_modules": …} adds names)'
# The number where no option says it, as on the other engines.
MAX_LORAS = 4
# The function beside LoraConfig that returns names of modules. Some versions have none.
NAMES_FUNCTION = "get_default_trtllm_modules_to_hf_modules"
# The name of a low-rank weight in a file. Its group is the last part of the name of its linear.
LOW_RANK_WEIGHT = re.compile(r"\.layers\.\d+\.(?:\w+\.)*(\w+)\.lora_[AB]\.weight$")
# What PEFT can save and the engine would leave out: each field with the values that mean it is off.
OFF_VALUES: dict[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
}


def arguments(llm_arguments: Mapping[str, Any]) -> dict[str, LoraConfig]:
    """Return the argument of LLM by which it takes adapters, if its other arguments ask for
    them.
    """
    if not llm_arguments.get("enable_lora"):
        return {}

    config = llm_arguments.get("lora_config") or LoraConfig()
    config.max_loras = config.max_loras or MAX_LORAS
    return {"lora_config": config}


def lora_request(adapter: LoadedAdapter) -> LoRARequest:
    """Return an adapter as TensorRT-LLM names it. Raises ValueError if its folder is gone."""
    return LoRARequest(lora_name=adapter.name, lora_int_id=adapter.number, lora_path=adapter.path)


async def read(llm: LLM, adapter: LoadedAdapter, beam_width: int) -> None:
    """Make the engine, which runs at this beam width, read the weights of an adapter.

    Raises the engine's error if it cannot.
    """
    search = beam_search(SamplingConfig(beam_width)) if beam_width > 1 else {}
    params = SamplingParams(max_tokens=1, end_id=-1, pad_id=0, detokenize=False, **search)
    await llm.generate_async(
        inputs={"prompt_token_ids": [0]}, sampling_params=params, lora_request=lora_request(adapter)
    )


def check_adapter(adapter: LoadedAdapter, config: LoraConfig) -> None:
    """Raise ValueError unless an engine with this configuration follows the whole adapter,
    Unsupported for a pin.

    Pickled weights are not opened here. Of weights that cannot be read the engine says so.
    """
    if adapter.is_pinned:
        raise Unsupported("pin", NO_PIN)

    path = Path(adapter.path)
    try:
        stored = msgspec.json.decode((path / CONFIG).read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{CONFIG}: {error}") from None

    reason = _config_fault(stored, config.max_lora_rank)
    if reason:
        raise ValueError(f"{CONFIG}: {reason}")

    weights = path / WEIGHTS
    reason = _weights_fault(weights, config) if weights.is_file() else None
    if reason:
        raise ValueError(f"{WEIGHTS}: {reason}")


def _config_fault(config: dict[str, Any], max_rank: int) -> str | None:
    """Return what the engine would not follow in the file of an adapter, or None."""
    if config.get("peft_type") != "LORA":
        return f"peft_type must be 'LORA', given {shorten(config.get('peft_type'))}"

    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        return f"r must be from 1 to {max_rank} (option.max_lora_rank), given {shorten(rank)}"

    for name, off_values in OFF_VALUES.items():
        if config.get(name) not in off_values:
            rule = f"{name} must be {shorten(off_values[-1])} or absent"
            return f"{rule}, given {shorten(config[name])}: it would be left out"

    return None


def _names_of_linears(config: LoraConfig) -> set[str]:
    """Return the names that checkpoints give to the linears that adapters may change in the engine,
    such as `q_proj`.

    The engine has its own names for them, and a table of what checkpoints call each: a name, such
    as in `{"attn_q": "q_proj", "shared_expert_gate": "shared_expert.up_proj"}`, or a list of names.
    The configuration may add to the table, and may limit the linears, by names of either kind.
    """
    table = _default_table() | config.trtllm_modules_to_hf_modules
    linears = set[str]()
    for target in config.lora_target_modules or table:
        names = table.get(target, target)
        if isinstance(names, str):
            names = [names]

        linears |= {name.rpartition(".")[2] for name in names}

    return linears


def _default_table() -> dict[str, str | list[str]]:
    """Return the engine's names of linears with those of checkpoints; nothing in a version without
    such a table.
    """
    module_of_config = sys.modules[LoraConfig.__module__]
    read_table = getattr(module_of_config, NAMES_FUNCTION, dict)
    return dict(read_table())


def _weights_fault(file: Path, config: LoraConfig) -> str | None:
    """Return what is wrong with the tensors of a file, or None, also if it cannot be read."""
    linears = _names_of_linears(config)
    shapes = dict[str, list[int]]()
    with suppress(SafetensorError), safe_open(file, "np") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}

    for name, shape in shapes.items():
        match = LOW_RANK_WEIGHT.search(name)
        if match is None or match[1] not in linears:
            return f"{name} would be left out: the engine has no low ranks there {WAY_OUT}"

        if len(shape) != 2:
            return f"{name} must have two dimensions, given the shape {shape}"

        # The other matrix has the rank as its second dimension, which the engine compares.
        rank = shape[0]
        if name.endswith("lora_A.weight") and rank > config.max_lora_rank:
            return f"{name} has the rank {rank}, and option.max_lora_rank is {config.max_lora_rank}"

    return None
