"""Translates an EngineConfig, whose options are in the words of vLLM's command line, to vLLM's
`AsyncEngineArgs`.
"""

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import AutoConfig
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from handlers.base.cache_budget import default_budget
from handlers.base.kv_events.endpoints import of_replica, replica_here
from handlers.base.pickles import pickled_files, refusal
from handlers.driven.arguments import DTYPES, OPTION_OF, boolean, named, tell_unknown
from handlers.lmi_vllm import compiling
from handlers.lmi_vllm.about import SPECULATIVE
from lmi.errors import BadConfiguration, shorten
from lmi.settings.annexes import KvEventsConfig
from lmi.settings.config import EngineConfig
from lmi.shared import machine

FIELDS = {
    field.name: field.type
    for field in dataclasses.fields(AsyncEngineArgs)
    if not field.name.startswith("_")
}
# The default of vLLM's server on a CPU.
NUM_SEQUENCES_ON_CPU = 128
SEQUENCES_PER_EXPRESS_PLACE = 32
MAX_EXPRESS_PLACES = 4
TOKENS_PER_BLOCK_ON_CPU = 128
TOKENS_PER_BLOCK = 16
SPECULATIVE_LENGTH = 5
# The max_logprobs of a server without a limit.
UNLIMITED = -1

# These differ from vLLM's defaults. lmi keeps the statistics, requests have priorities, and no
# progress bar is drawn into the log. The front end fills in the parameters that a request leaves
# out, also those of generation_config.json; with "vllm" vLLM still adds the end tokens of that file
# to each request that does not ignore them.
DEFAULTS: dict[str, Any] = {
    "disable_log_stats": True,
    "generation_config": "vllm",
    "max_logprobs": 20,
    # That cache needs every request that was read to reach the core. A cancelled one does not.
    "mm_processor_cache_gb": 0,
    "scheduling_policy": "priority",
    "seed": 0,
    "use_tqdm_on_load": False,
}

# The fields of vLLM that an option of lmi sets, each with the field of an EngineConfig.
OURS = {
    "max_num_seqs": "max_num_sequences",
    "max_num_batched_tokens": "max_prefill_tokens",
    "max_model_len": "max_sequence_length",
    "quantization": "quantize",
    "enable_prefix_caching": "enable_prefix_caching",
    "tensor_parallel_size": "tensor_parallel_degree",
    "pipeline_parallel_size": "pipeline_parallel_degree",
    "trust_remote_code": "trust_remote_code",
}
OUR_NAMES = {field: OPTION_OF[name] for field, name in OURS.items()} | {
    "num_gpu_blocks_override": "max_kv_cache_tokens",
    "cache_dtype": "kv_cache_dtype",
}

log = logging.getLogger("lmi.vllm")


def engine_arguments(
    config: EngineConfig, model_path: str, memory_bytes: int | None = None
) -> dict[str, Any]:
    """The keyword arguments of `AsyncEngineArgs`, which LLMEngine takes too. Warnings go to the
    log.

    `memory_bytes` is what all engines may use of a CPU's memory; None: what this machine has.
    Raises BadConfiguration with one line for each fault, SecurityRefused for weights that would be
    unpickled.
    """
    typed = _typed(config)
    _check(config, Path(model_path), typed.get("load_format", "auto"))
    arguments = {**DEFAULTS, "model": model_path, "dtype": DTYPES[config.dtype]}
    for field, name in OURS.items():
        value = getattr(config, name)
        if value is not None:
            arguments[field] = value

    arguments |= typed
    if "max_num_seqs" in arguments:
        num_places = arguments["max_num_seqs"] // SEQUENCES_PER_EXPRESS_PLACE
        arguments["max_num_seqs"] += min(MAX_EXPRESS_PLACES, num_places)

    if config.max_beam_width > 1 and arguments["max_logprobs"] != UNLIMITED:
        num_candidates = 2 * config.max_beam_width
        arguments["max_logprobs"] = max(arguments["max_logprobs"], num_candidates)

    if current_platform.is_cpu():
        arguments |= _cache_on_cpu(config, arguments, memory_bytes or machine.memory_bytes())
        if "enforce_eager" not in config.options and compiling.is_eager(config.options):
            # vLLM compiles by default and would not start.
            why = compiling.why_no_compiler()
            if why:
                log.warning("vLLM runs the model eagerly, which is up to a quarter slower: %s", why)

            arguments["enforce_eager"] = True
    elif config.max_kv_cache_tokens is not None:
        block_size = typed.get("block_size") or TOKENS_PER_BLOCK
        arguments |= _cache_in_blocks(config, config.max_kv_cache_tokens, block_size)

    if config.kv_events_config is not None:
        arguments["kv_events_config"] = _kv_events(config.kv_events_config, config.num_engines)

    return arguments


def _kv_events(config: KvEventsConfig, num_replicas: int) -> KVEventsConfig:
    """vLLM's configuration of events of the cache, with the sockets of this replica. Raises
    BadConfiguration.
    """
    config = of_replica(config, replica_here(), num_replicas)
    fields = {}
    for name, value in msgspec.structs.asdict(config).items():
        if value is not None:
            fields[name] = value

    return KVEventsConfig(**fields)


def num_express_places(max_num_seqs: int) -> int:
    """How many of vLLM's places are beside the batch: a few, for requests of light clients."""
    return min(MAX_EXPRESS_PLACES, max_num_seqs // (SEQUENCES_PER_EXPRESS_PLACE + 1))


def _check(config: EngineConfig, folder: Path, load_format: str) -> None:
    """Refuse a device of another build, a cache that cannot hold the longest sequence, and pickled
    weights.

    vLLM checks the cache too, but reports it in terms of memory. It reads pickled weights if the
    format asks for it, or if there is no safetensors file.
    """
    has_cpu_build = current_platform.is_cpu()
    if config.device != "auto" and (config.device == "cpu") != has_cpu_build:
        build = "CPUs" if has_cpu_build else "GPUs"
        raise BadConfiguration(
            f"{named_for(config, 'device', config.device)}: this vLLM is built for {build}"
        )

    num_tokens = config.max_kv_cache_tokens
    length = config.max_sequence_length
    if num_tokens is not None and length is not None and num_tokens < length:
        option = named_for(config, "max_kv_cache_tokens", str(num_tokens))
        raise BadConfiguration(f"{option}: allowed is at least option.max_model_len, {length}")

    if config.allow_pickle:
        return

    takes_any = load_format in ("auto", "hf") and not any(folder.glob("*.safetensors"))
    reads_pickles = takes_any or load_format in ("pt", "npcache")
    pickled = pickled_files(folder) if reads_pickles else []
    if pickled:
        raise refusal(pickled[0])


def _typed(config: EngineConfig) -> dict[str, Any]:
    """The options with vLLM's names, each as its field's type. Raises BadConfiguration."""
    values: dict[str, Any] = {}
    faults = []
    flags = _flags() if config.options else {}
    for name, text in config.options.items():
        if name in SPECULATIVE:
            continue

        if name == "model":
            faults.append(f"{named_for(config, name, text)}: the model is named by option.model_id")
        elif name not in FIELDS:
            message = f"{named_for(config, name)}: vLLM has no such argument"
            tell_unknown(config, message, name, FIELDS, faults)
        else:
            try:
                values[name] = _value(name, text, flags.get(name))
            except ValueError as error:
                faults.append(f"{named_for(config, name, text)}: allowed is {error}")

    values |= _speculation(config, faults)
    if faults:
        raise BadConfiguration("\n".join(faults))

    return values


def _flags() -> dict[str, argparse.Action]:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    return {action.dest: action for action in parser._actions}


def _value(name: str, text: str, flag: argparse.Action | None) -> Any:
    """Read a text as vLLM's flag does. Raises ValueError with the allowed values."""
    if flag is None:
        return _value_without_flag(name, text)

    if isinstance(flag, argparse.BooleanOptionalAction) or flag.nargs == 0:
        return boolean(text)

    if flag.nargs in ("+", "*") or isinstance(flag.nargs, int):
        return [_word(name, word, flag) for word in _words(text)]

    if flag.nargs == "?" and text.lower() == "true":
        return flag.const

    return _word(name, text, flag)


def _value_without_flag(name: str, text: str) -> Any:
    """Read a text for a field that vLLM's command line leaves out. Raises ValueError."""
    hint: Any = FIELDS[name]
    is_plain = dataclasses.is_dataclass(hint) or isinstance(hint, type)
    config = None if is_plain else ConfigDict(arbitrary_types_allowed=True)
    try:
        adapter = TypeAdapter(hint, config=config)
        if text[:1] in "{[":
            return adapter.validate_json(text)

        return adapter.validate_python(text)
    except ValidationError as error:
        raise ValueError(shorten(error.errors()[0]["msg"], 200)[1:-1]) from None


def _word(name: str, text: str, flag: argparse.Action) -> Any:
    try:
        value = flag.type(text) if callable(flag.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise ValueError(_allowed(name, flag, error)) from None

    if flag.choices is not None and value not in flag.choices:
        raise ValueError(_allowed(name, flag))

    return value


def _allowed(name: str, flag: argparse.Action, error: Exception | None = None) -> str:
    if flag.choices is not None:
        return ", ".join(str(choice) for choice in flag.choices if choice is not None)

    types = _types_in(FIELDS[name])
    is_plain = not any(get_origin(type) is dict for type in types)
    if is_plain and int in types:
        return "a whole number"

    if is_plain and float in types:
        return "a number"

    return f"what vLLM's {name} takes ({shorten(str(error), 200)[1:-1]})"


def _types_in(hint: Any) -> list[Any]:
    """The hint and all types in it: for list[int] | None also list[int], int and None."""
    types = [hint]
    for part in get_args(hint):
        types += _types_in(part)

    return types


def _words(text: str) -> list[str]:
    """Read a list, in JSON or as words with commas or blanks between."""
    if not text.startswith("["):
        return text.replace(",", " ").split()

    try:
        words = json.loads(text)
    except ValueError:
        raise ValueError("a list in JSON, or words with commas between") from None

    return [word if isinstance(word, str) else json.dumps(word) for word in words]


def _speculation(config: EngineConfig, faults: list[str]) -> dict[str, Any]:
    """vLLM's speculative_config from LMI's options for a draft model."""
    texts = {name: config.options[name] for name in SPECULATIVE if name in config.options}
    model = texts.pop("speculative_draft_model", None)
    if model is None:
        for name in sorted(texts):
            option = named_for(config, name)
            log.warning("%s: has no effect without option.speculative_draft_model", option)

        return {}

    if "speculative_config" in config.options:
        faults.append(
            "option.speculative_draft_model and option.speculative_config: allowed is one of them"
        )
        return {}

    fields: dict[str, Any] = {"model": model, "num_speculative_tokens": SPECULATIVE_LENGTH}
    for name, text in texts.items():
        if text.isascii() and text.isdigit() and 0 < int(text) < 1024:
            fields[SPECULATIVE[name]] = int(text)
        else:
            faults.append(f"{named_for(config, name, text)}: allowed is a whole number 1..1023")

    return {"speculative_config": fields}


def _cache_on_cpu(
    config: EngineConfig, arguments: Mapping[str, Any], memory_bytes: int
) -> dict[str, Any]:
    """Size the KV cache for what the sequences can use, at most a quarter of memory.

    vLLM's default is nine tenths of all memory, and it does not start if other processes hold too
    much of it. It takes the size in bytes for each rank. If a number of blocks is given too, only
    that counts, so a high estimate of the bytes does no harm. If the shape of the model's cache is
    not known, the cache takes the whole quarter.
    """
    sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
    has_size = any(name in arguments for name in sizes)
    has_variable = bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    if (has_size or has_variable) and config.max_kv_cache_tokens is None:
        return {}

    memory_bytes //= config.num_engines
    num_ranks = config.tensor_parallel_degree
    block_size = arguments.get("block_size") or TOKENS_PER_BLOCK_ON_CPU
    shape = _cache_shape(config, str(arguments["model"]))

    in_blocks: dict[str, Any] = {}
    if config.max_kv_cache_tokens:
        in_blocks = _cache_in_blocks(config, config.max_kv_cache_tokens, block_size)
    elif "max_model_len" not in arguments:
        # A context of -1 is as long as the cache can hold.
        in_blocks = {"max_model_len": -1}

    if shape is None:
        return {"kv_cache_memory_bytes": memory_bytes // 4 // num_ranks, **in_blocks}

    length = min(config.max_sequence_length or shape.context_length, shape.context_length)
    num_sequences = arguments.get("max_num_seqs") or NUM_SEQUENCES_ON_CPU
    budget = default_budget(num_sequences, length, shape.token_bytes * num_ranks, memory_bytes)
    num_tokens = config.max_kv_cache_tokens or max(budget, config.max_sequence_length or 0)
    num_blocks = _cache_in_blocks(config, num_tokens, block_size)["num_gpu_blocks_override"]
    return {"kv_cache_memory_bytes": num_blocks * block_size * shape.token_bytes, **in_blocks}


def _cache_in_blocks(
    config: EngineConfig, num_tokens: int, tokens_per_block: int
) -> dict[str, Any]:
    """Ask for one block more than the tokens need, which vLLM reserves. A context that does not fit
    is shortened.
    """
    num_blocks = -(-num_tokens // tokens_per_block)
    arguments: dict[str, Any] = {"num_gpu_blocks_override": num_blocks + 1}
    if config.max_sequence_length is None:
        arguments["max_model_len"] = -1

    return arguments


class CacheShape(NamedTuple):
    """The bytes of cache of one token on one rank, and the length of the model's context."""

    token_bytes: int
    context_length: int


def _cache_shape(config: EngineConfig, model_path: str) -> CacheShape | None:
    """None if config.json lacks the shape."""
    try:
        model = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=config.trust_remote_code
        ).get_text_config()
        num_heads = model.num_attention_heads
        num_kv_heads = getattr(model, "num_key_value_heads", None) or num_heads
        head_dim = getattr(model, "head_dim", None) or model.hidden_size // num_heads

        # vLLM's auto turns 32 bits into 16.
        element_bytes = 4 if config.dtype == "fp32" else 2
        heads_a_rank = max(1, num_kv_heads // config.tensor_parallel_degree)
        layer_bytes = 2 * heads_a_rank * head_dim * element_bytes
        return CacheShape(model.num_hidden_layers * layer_bytes, model.max_position_embeddings)
    except Exception:
        # vLLM reports a fault of the file better.
        return None


def named_for(config: EngineConfig, name: str, text: str | None = None) -> str:
    """As `named`, for an argument of vLLM. The name is lmi's where lmi has one."""
    our_name = OUR_NAMES.get(name, name)
    if our_name not in config.option_sources and name in config.option_sources:
        our_name = name

    return named(config, our_name, text)
