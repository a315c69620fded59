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
# Defaults of vLLM.
NUM_SEQUENCES_ON_CPU = 128
TOKENS_PER_BLOCK_ON_CPU = 128
TOKENS_PER_BLOCK = 16
# One place for requests of light clients beside so many sequences, and so many at most.
SEQUENCES_PER_EXPRESS_PLACE = 32
MAX_EXPRESS_PLACES = 4
# How many tokens a draft model guesses.
SPECULATIVE_LENGTH = 5
# The arguments that size the KV cache.
SIZES_OF_CACHE = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")
# The max_model_len that vLLM makes as long as the cache can hold.
AS_LONG_AS_THE_CACHE = -1
# The max_logprobs of a server without a limit.
UNLIMITED = -1

# The arguments whose defaults here differ from vLLM's.
DEFAULTS: dict[str, Any] = {
    # lmi keeps the statistics.
    "disable_log_stats": True,
    # The front end fills in the parameters that a request leaves out, also those of
    # generation_config.json. With this value vLLM still adds the end tokens of that file to each
    # request that does not ignore them.
    "generation_config": "vllm",
    "max_logprobs": 20,
    # That cache needs every request that was read to reach the core. A cancelled one does not.
    "mm_processor_cache_gb": 0,
    # Requests have priorities.
    "scheduling_policy": "priority",
    "seed": 0,
    # No progress bar is drawn into the log.
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
    """Return the keyword arguments of `AsyncEngineArgs`, which LLMEngine takes too. Warnings go to
    the log.

    `memory_bytes` is what all engines may use of a CPU's memory; None: what this machine has.
    Raises BadConfiguration with one line for each fault, SecurityRefused for weights that would be
    unpickled.
    """
    vllm_options = _vllm_options(config)
    _check(config, Path(model_path), vllm_options.get("load_format", "auto"))
    arguments = {**DEFAULTS, "model": model_path, "dtype": DTYPES[config.dtype]}
    for field, name in OURS.items():
        value = getattr(config, name)
        if value is not None:
            arguments[field] = value

    arguments |= vllm_options
    if "max_num_seqs" in arguments:
        num_places = arguments["max_num_seqs"] // SEQUENCES_PER_EXPRESS_PLACE
        arguments["max_num_seqs"] += min(MAX_EXPRESS_PLACES, num_places)

    if config.max_beam_width > 1 and arguments["max_logprobs"] != UNLIMITED:
        num_candidates = 2 * config.max_beam_width
        arguments["max_logprobs"] = max(arguments["max_logprobs"], num_candidates)

    if current_platform.is_cpu():
        arguments |= _cache_on_cpu(config, arguments, memory_bytes or machine.memory_bytes())
        arguments |= _eagerness_on_cpu(config)
    elif config.max_kv_cache_tokens is not None:
        block_size = vllm_options.get("block_size") or TOKENS_PER_BLOCK
        arguments |= _cache_in_blocks(config, config.max_kv_cache_tokens, block_size)

    if config.kv_events_config is not None:
        arguments["kv_events_config"] = _kv_events(config.kv_events_config, config.num_engines)

    return arguments


def _eagerness_on_cpu(config: EngineConfig) -> dict[str, Any]:
    """Return the argument without which vLLM compiles, and does not start where it cannot.

    An option that says whether it compiles stays as it is.
    """
    if "enforce_eager" in config.options or not compiling.is_eager(config.options):
        return {}

    reason = compiling.why_no_compiler()
    if reason:
        log.warning("vLLM runs the model eagerly, which is up to a quarter slower: %s", reason)

    return {"enforce_eager": True}


def _kv_events(config: KvEventsConfig, num_replicas: int) -> KVEventsConfig:
    """Return vLLM's configuration of events of the cache, with the sockets of this replica.

    Raises BadConfiguration.
    """
    config = of_replica(config, replica_here(), num_replicas)
    fields = {}
    for name, value in msgspec.structs.asdict(config).items():
        if value is not None:
            fields[name] = value

    return KVEventsConfig(**fields)


def num_express_places(max_num_seqs: int) -> int:
    """Return how many of vLLM's places are beside the batch, for requests of light clients."""
    return min(MAX_EXPRESS_PLACES, max_num_seqs // (SEQUENCES_PER_EXPRESS_PLACE + 1))


def _check(config: EngineConfig, folder: Path, load_format: str) -> None:
    """Raise BadConfiguration for a device of another build, and for a cache that cannot hold the
    longest sequence; SecurityRefused for pickled weights.

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

    reads_pickles = load_format in ("pt", "npcache")
    if load_format in ("auto", "hf") and not any(folder.glob("*.safetensors")):
        reads_pickles = True

    pickled = pickled_files(folder) if reads_pickles else []
    if pickled:
        raise refusal(pickled[0])


def _vllm_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options that have vLLM's names, each as its field's type.

    Raises BadConfiguration.
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
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
    """Return the flags of vLLM's command line by the fields that they set."""
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
    is_class = dataclasses.is_dataclass(hint) or isinstance(hint, type)
    # Classes say themselves what they allow.
    settings = None if is_class else ConfigDict(arbitrary_types_allowed=True)
    try:
        adapter = TypeAdapter(hint, config=settings)
        if text[:1] in "{[":
            return adapter.validate_json(text)

        return adapter.validate_python(text)
    except ValidationError as error:
        raise ValueError(shorten(error.errors()[0]["msg"], 200)[1:-1]) from None


def _word(name: str, text: str, flag: argparse.Action) -> Any:
    """Read one word of a flag. Raises ValueError with the allowed values."""
    try:
        value = flag.type(text) if callable(flag.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise ValueError(_allowed(name, flag, error)) from None

    if flag.choices is not None and value not in flag.choices:
        raise ValueError(_allowed(name, flag))

    return value


def _allowed(name: str, flag: argparse.Action, error: Exception | None = None) -> str:
    """Return the values that a flag allows, in words."""
    if flag.choices is not None:
        return ", ".join(str(choice) for choice in flag.choices if choice is not None)

    types = _types_in(FIELDS[name])
    has_dict = any(get_origin(hint) is dict for hint in types)
    if int in types and not has_dict:
        return "a whole number"

    if float in types and not has_dict:
        return "a number"

    return f"what vLLM's {name} takes ({shorten(str(error), 200)[1:-1]})"


def _types_in(hint: Any) -> list[Any]:
    """Return the hint and all types in it: of list[int] | None also list[int], int and None."""
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
    """Return vLLM's speculative_config, from LMI's options for a draft model.

    Adds a line to `faults` for each fault.
    """
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
    """Return the arguments that size the KV cache: for what the sequences can use, at most a
    quarter of memory.

    vLLM's default is nine tenths of all memory, and it does not start if other processes hold too
    much of it. It takes the size in bytes for each rank. If a number of blocks is given too, only
    that counts, so a high estimate of the bytes does no harm.
    """
    has_size = any(name in arguments for name in SIZES_OF_CACHE)
    has_variable = bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    if (has_size or has_variable) and config.max_kv_cache_tokens is None:
        return {}

    block_size = arguments.get("block_size") or TOKENS_PER_BLOCK_ON_CPU
    sizes: dict[str, Any] = {}
    if config.max_kv_cache_tokens:
        sizes = _cache_in_blocks(config, config.max_kv_cache_tokens, block_size)
    elif "max_model_len" not in arguments:
        sizes["max_model_len"] = AS_LONG_AS_THE_CACHE

    engine_bytes = memory_bytes // config.num_engines
    sizes["kv_cache_memory_bytes"] = _cache_bytes(config, arguments, engine_bytes, block_size)
    return sizes


def _cache_bytes(
    config: EngineConfig, arguments: Mapping[str, Any], memory_bytes: int, block_size: int
) -> int:
    """Return the bytes of the cache of one rank of an engine that has so much memory.

    If the shape of the model's cache is not known, the cache takes a whole quarter.
    """
    num_ranks = config.tensor_parallel_degree
    shape = _cache_shape(config, str(arguments["model"]))
    if shape is None:
        return memory_bytes // 4 // num_ranks

    length = min(config.max_sequence_length or shape.context_length, shape.context_length)
    num_sequences = arguments.get("max_num_seqs") or NUM_SEQUENCES_ON_CPU
    budget = default_budget(num_sequences, length, shape.token_bytes * num_ranks, memory_bytes)

    num_tokens = config.max_kv_cache_tokens or max(budget, config.max_sequence_length or 0)
    num_blocks = _num_blocks_for(num_tokens, block_size)
    return num_blocks * block_size * shape.token_bytes


def _cache_in_blocks(
    config: EngineConfig, num_tokens: int, tokens_per_block: int
) -> dict[str, Any]:
    """Return the arguments for a cache of so many tokens. A context that does not fit is
    shortened.
    """
    num_blocks = _num_blocks_for(num_tokens, tokens_per_block)
    arguments: dict[str, Any] = {"num_gpu_blocks_override": num_blocks}
    if config.max_sequence_length is None:
        arguments["max_model_len"] = AS_LONG_AS_THE_CACHE

    return arguments


def _num_blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Return how many blocks tokens need, and one more, which vLLM reserves."""
    return -(-num_tokens // tokens_per_block) + 1


class CacheShape(NamedTuple):
    """How large the cache of a model is."""

    # The bytes of one token on one rank.
    token_bytes: int
    context_length: int


def _cache_shape(config: EngineConfig, model_path: str) -> CacheShape | None:
    """Return the shape that config.json says, or None if it lacks a part of it."""
    try:
        model = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=config.trust_remote_code
        ).get_text_config()
        num_heads = model.num_attention_heads
        num_kv_heads = getattr(model, "num_key_value_heads", None) or num_heads
        head_dim = getattr(model, "head_dim", None) or model.hidden_size // num_heads

        # vLLM's auto turns 32 bits into 16.
        number_bytes = 4 if config.dtype == "fp32" else 2
        num_heads_of_rank = max(1, num_kv_heads // config.tensor_parallel_degree)
        # Keys and values.
        layer_bytes = 2 * num_heads_of_rank * head_dim * number_bytes
        token_bytes = model.num_hidden_layers * layer_bytes
        return CacheShape(token_bytes, model.max_position_embeddings)
    except Exception:
        # vLLM reports a fault of the file better.
        return None


def named_for(config: EngineConfig, name: str, text: str | None = None) -> str:
    """Return the option that set an argument of vLLM, as `named` does. The name is lmi's where lmi
    has one.
    """
    our_name = OUR_NAMES.get(name, name)
    if our_name not in config.option_sources and name in config.option_sources:
        our_name = name

    return named(config, our_name, text)
