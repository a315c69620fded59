"""Loads a checkpoint for the device and the runner that fit the machine, with the limits that its
memory allows.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from msgspec.structs import replace

from handlers.base.cache_budget import default_budget
from handlers.lmi_dist.batch import (
    LEAST_BATCH,
    LEAST_BUDGET_S,
    SHARE_OF_LOAD,
    choose_batch,
    measured,
)
from handlers.lmi_dist.config_file import INSTALL_TORCH, check_extra
from handlers.lmi_dist.defaults import MAX_NUM_SEQUENCES, QUANTIZE_METHODS
from handlers.lmi_dist.facts import ModelFacts, read_facts
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.memory import need_of, room_for_cache, say_memory
from handlers.lmi_dist.native import library as native
from handlers.lmi_dist.native_runner import (
    NativeRunner,
    block_bytes,
    bytes_of_file,
    kv_format,
    weight_bytes,
)
from handlers.lmi_dist.post_processors import ARRAYS, PostProcessors
from handlers.lmi_dist.runner import Limits, Runner
from handlers.lmi_dist.sampler import MAX_TOP_LOG_PROBS
from handlers.lmi_dist.weights import stored_dtype
from lmi.errors import BadConfiguration, ModelUnusable, error_line
from lmi.executor import Capabilities, EngineInfo, ExecutorConfig, GuideType, Progress
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig
from lmi.settings.handler import folder_of
from lmi.shared import linux, machine
from lmi.shared.machine import Machine

log = logging.getLogger(__name__)

# A folder with a checkpoint, or what has its weights already.
Model: TypeAlias = str | os.PathLike[str] | Runner

SLOTS_PER_EXPRESS_PLACE = 16
# What the code raises where a file breaks a rule that nothing checks.
_FAULTS_OF_FILES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


@contextmanager
def in_files(model: Model | bytes, json_config_str: str | None) -> Iterator[Model]:
    """The model as it is, or a folder with its bytes and its config.json, for as long as the load
    lasts.

    The bytes are those of one safetensors file. Errors name the arguments, not the files.
    """
    if not isinstance(model, bytes):
        yield model
        return

    if json_config_str is None:
        raise broken("json_config_str", "the text of config.json", None)

    with TemporaryDirectory(prefix="lmi-model-") as folder:
        weights = Path(folder, "model.safetensors")
        config = Path(folder, "config.json")
        weights.write_bytes(model)
        config.write_text(json_config_str, encoding="utf-8")
        try:
            yield folder
        except ModelUnusable as error:
            message = str(error)
            message = message.replace(str(weights), "engine_buffer")
            message = message.replace(str(config), "json_config_str")
            message = message.replace(folder, "engine_buffer")
            raise ModelUnusable(message) from error


def choose_limits(
    config: EngineConfig,
    context_length: int,
    tokens_per_block: int,
    token_bytes: int,
    device_bytes: int | None = None,
    room_bytes: int | None = None,
) -> Limits:
    """The limits of the configuration, lowered to what the model and the memory allow.

    `token_bytes` is the size of the keys and values of one token. `device_bytes` is the memory of
    an accelerator, where a slot costs all of its memory at once; in that of the machine it costs
    only what was written, and `room_bytes` is what is left of it beside the model. A sequence is
    never longer than the whole cache: otherwise it could wait without end.
    """
    max_length = min(config.max_sequence_length or context_length, context_length)
    if max_length < (config.max_sequence_length or 0):
        log.warning(
            "option.max_model_len=%d is over the model's context: prompt and answer may have %d "
            "tokens together",
            config.max_sequence_length,
            context_length,
        )

    num_slots = config.max_num_sequences or MAX_NUM_SEQUENCES
    memory_bytes = device_bytes or machine.memory_bytes()
    budget = config.max_kv_cache_tokens
    if not budget:
        budget = default_budget(num_slots, max_length, token_bytes, memory_bytes)

    if room_bytes is not None and budget * token_bytes > room_bytes:
        budget = _fitting(config, budget, room_bytes // token_bytes)

    num_cache_tokens = max(budget // tokens_per_block, 1) * tokens_per_block
    if num_cache_tokens < max_length:
        log.warning(
            "prompt and answer may have %d tokens together, not the model's %d: the KV cache holds "
            "no more",
            num_cache_tokens,
            max_length,
        )
        max_length = num_cache_tokens

    if device_bytes is None:
        return Limits(num_slots, max_length, num_cache_tokens, num_slots // SLOTS_PER_EXPRESS_PLACE)

    num_slot_tokens = max(num_cache_tokens, device_bytes // 4 // token_bytes)
    num_slots = max(1, min(num_slots, num_slot_tokens // max_length))
    return Limits(num_slots, max_length, num_cache_tokens)


def _fitting(config: EngineConfig, budget: int, num_fitting: int) -> int:
    """The tokens of a cache that is larger than the memory.

    What an operator says counts: it is not taken at once.
    """
    if config.max_kv_cache_tokens is None:
        return num_fitting

    log.warning(
        "option.max_kv_cache_tokens=%d is more than fits into memory now, %d: "
        "who finds no memory gets 507",
        budget,
        num_fitting,
    )
    return budget


def load_runner(model: Model, config: EngineConfig, progress: Progress) -> tuple[Runner, Limits]:
    """The runner of a model and the limits: that of a checkpoint is native, or of torch where that
    cannot run it.
    """
    if not isinstance(model, str | os.PathLike):
        size = model.tokens_per_block
        return model, choose_limits(config, model.context_length, size, token_bytes=1)

    with of_files(os.fspath(model)):
        facts = read_facts(os.fspath(model))

    if facts.pooling is not None:
        _check_embedding(config)

    device = choose_device(config)
    library = choose_library(facts, device, config)
    with of_files(facts.path):
        return _load(facts, device, library, config, progress)


@contextmanager
def of_files(place: str) -> Iterator[None]:
    """Raise ModelUnusable for a fault of the files that no rule has found, so that nobody tries the
    load again.

    They are the same in each attempt. An error of the machine, as a lack of memory, passes.
    """
    try:
        yield
    except _FAULTS_OF_FILES as error:
        log.debug("the load failed", exc_info=True)
        raise ModelUnusable(f"{place}: the model cannot be loaded: {error_line(error)}") from error


def _load(
    facts: ModelFacts,
    device: str,
    library: native.Library | None,
    config: EngineConfig,
    progress: Progress,
) -> tuple[Runner, Limits]:
    if library is None:
        return _load_torch(facts, device, config, progress)

    size = NativeRunner.tokens_per_block
    bytes_of_block = library.block_bytes(
        facts.num_layers,
        facts.num_kv_heads,
        facts.head_dim,
        kv_format(library, config, stored_dtype(facts.path)),
    )
    token_bytes = bytes_of_block // size
    kept_bytes = bytes_of_file(library, config, facts.path)
    need = need_of(
        facts,
        config,
        partial(weight_bytes, facts, config),
        kept_bytes,
        block_bytes(library, config),
    )
    room_bytes = room_for_cache(facts, need, size * token_bytes)
    limits = choose_limits(
        config, facts.context_length, size, token_bytes=token_bytes, room_bytes=room_bytes
    )
    say_memory(need, limits.num_cache_tokens * token_bytes, limits.num_cache_tokens)

    started_s = time.monotonic()
    runner = NativeRunner(facts, library, config, limits, progress)
    limits = with_batch(limits, runner, config, time.monotonic() - started_s)
    # The largest steps that were measured are not those of an engine that waits.
    runner.memory.release_activations()
    return runner, limits


def with_batch(limits: Limits, runner: Runner, config: EngineConfig, load_s: float) -> Limits:
    """Limits with the largest batch that pays here, where no option says how many sequences run at
    once.
    """
    has_option = config.max_num_sequences is not None and not config.is_batch_default
    is_too_short = limits.max_length < limits.num_slots
    if has_option or runner.pooling is not None or is_too_short:
        return limits

    least = min(max(LEAST_BATCH, config.max_beam_width), limits.num_slots)
    budget_s = max(LEAST_BUDGET_S, SHARE_OF_LOAD * load_s)
    choice = choose_batch(measured(runner), least, limits.num_slots, budget_s)
    log.info("batch: %d sequences at once: %s", choice.num_sequences, choice.why)

    num_express = max(1, choice.num_sequences // SLOTS_PER_EXPRESS_PLACE)
    return replace(
        limits, num_slots=choice.num_sequences, num_express=num_express, batch_reason=choice.why
    )


def _check_embedding(config: EngineConfig) -> None:
    """Raise BadConfiguration for an option that needs a model which generates."""
    values = {
        "enable_lora": LoraLimits.of(config.options),
        "additional_outputs": config.additional_outputs,
        "logits_post_processors": config.logits_post_processors,
    }
    faults: list[str] = []
    for name, value in values.items():
        if value:
            faults.append(f"option.{name}: lmi-dist does not have it for an embedding model")

    if faults:
        raise BadConfiguration("\n".join(faults))


def choose_device(config: EngineConfig) -> str:
    """ "cuda" or "cpu"; raises BadConfiguration if the configuration wants what is not there."""
    device = "cuda" if config.device != "cpu" and _has_cuda(config) else "cpu"
    is_built = config.quantize in QUANTIZE_METHODS and device == "cpu"
    if config.quantize is not None and not is_built:
        methods = " and ".join(sorted(QUANTIZE_METHODS))
        raise BadConfiguration(
            f"option.quantize={config.quantize} on {device}: only {methods} on cpu are built"
        )

    return device


def _has_cuda(config: EngineConfig) -> bool:
    is_wanted = config.device == "cuda"
    if not is_wanted and not Machine.here(os.environ).gpus:
        return False

    if folder_of("torch") is None:
        if is_wanted:
            raise BadConfiguration(
                f"option.device=cuda needs torch, which is not installed: {INSTALL_TORCH}"
            )

        log.warning(
            "the CPU computes although a GPU is here: without torch lmi-dist cannot use it; %s",
            INSTALL_TORCH,
        )
        return False

    import torch

    if not torch.cuda.is_available() and is_wanted:
        raise BadConfiguration(
            "option.device=cuda, but torch sees no CUDA device here; use cpu or auto"
        )

    return torch.cuda.is_available()


def choose_library(facts: ModelFacts, device: str, config: EngineConfig) -> native.Library | None:
    """The native kernels, or None if the model or the machine needs torch.

    A line of the log says which, and why.
    """
    try:
        if device != "cpu":
            raise native.NotAvailable(f"the native kernels do not run on {device}")

        if facts.architecture is None:
            raise native.NotAvailable(f"only the modules of transformers know {facts.name}")

        library = native.load()
    except native.NotAvailable as error:
        if config.quantize is not None:
            raise BadConfiguration(
                f"option.quantize={config.quantize} needs the native kernels, but {error}"
            ) from error

        check_extra(facts.path, f"torch would run it, because {error}")
        log.info(
            "kernels: torch, because %s; the last bits of an answer may depend on its neighbours",
            error,
        )
        return None

    log.info("kernels: native %s, on %s", library.kind, describe_threads(native.num_threads()))
    return library


def describe_threads(num_threads: int) -> str:
    """The threads of a step and, where the machine has more cores, why there are not more."""
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    num_cores = machine.num_usable_cores()
    if num_threads >= num_cores:
        return threads

    why = os.environ.get(linux.THREADS_WHY, "OMP_NUM_THREADS")
    return f"{threads} (of {num_cores} cores: {why})"


def _load_torch(
    facts: ModelFacts, device: str, config: EngineConfig, progress: Progress
) -> tuple[Runner, Limits]:
    import torch

    from handlers.lmi_dist.model_runner import ModelRunner
    from handlers.lmi_dist.placement import choose_placement

    placement = choose_placement(config, device, facts.dtype)
    device_bytes: int | None = None
    if placement.device.type == "cuda":
        _, device_bytes = torch.cuda.mem_get_info()

    token_bytes = facts.kv_bytes_per_token(placement.dtype.itemsize)
    limits = choose_limits(
        config, facts.context_length, ModelRunner.tokens_per_block, token_bytes, device_bytes
    )
    return ModelRunner(facts, placement, config, limits, progress), limits


def describe(
    runner: Runner,
    limits: Limits,
    settings: ExecutorConfig,
    why_no_guides: str,
    post_processors: PostProcessors | None,
) -> EngineInfo:
    """Return what the engine says of itself. `why_no_guides` is "" if there are guides."""
    max_loras = 0
    if runner.adapters is not None:
        max_loras = runner.adapters.limits.max_in_batch

    return EngineInfo(
        name="lmi-dist",
        vocab_size=runner.vocab_size,
        max_sequence_length=limits.max_length,
        max_num_sequences=limits.num_slots,
        batch_reason=limits.batch_reason,
        num_express_places=limits.num_express,
        max_loras=max_loras,
        dtype=runner.dtype,
        device=runner.device,
        kernels=runner.kernels,
        max_kv_cache_tokens=limits.num_cache_tokens,
        capabilities=_capabilities(runner, limits, settings, why_no_guides, post_processors),
    )


def _capabilities(
    runner: Runner,
    limits: Limits,
    settings: ExecutorConfig,
    why_no_guides: str,
    post_processors: PostProcessors | None,
) -> Capabilities:
    if runner.pooling is not None:
        return Capabilities(perf_metrics=True, priority=True, embeddings=runner.pooling.embeddings)

    reuses_blocks = runner.slots is None and settings.kv_cache_config.enable_block_reuse

    return Capabilities(
        max_beam_width=min(settings.max_beam_width, limits.num_slots),
        num_return_sequences=True,
        guided_decoding=() if why_no_guides else tuple(GuideType),
        why_no_guides=why_no_guides,
        typical_p=True,
        embedding_bias=True,
        no_repeat_ngram_size=True,
        perf_metrics=True,
        context_logits=True,
        generation_logits=True,
        additional_outputs=tuple(settings.additional_model_outputs),
        logits_post_processors=post_processors.names if post_processors else (),
        logits_post_processor_arrays=ARRAYS,
        log_probs_before_processors=True,
        max_top_log_probs=min(MAX_TOP_LOG_PROBS, runner.vocab_size),
        priority=True,
        kv_cache_retention=reuses_blocks,
        lora=runner.adapters is not None,
        adapter_pins=True,
        batch_invariant=runner.is_batch_invariant,
        log_probs_invariant=runner.is_batch_invariant,
    )
