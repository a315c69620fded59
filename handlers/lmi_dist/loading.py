"""Loads a checkpoint into the runner that fits the machine, with the limits that its memory allows.

`backend.py` chooses what computes the model, `limits.py` and `batch.py` choose the limits.
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

from handlers.lmi_dist.backend import choose_device, choose_library
from handlers.lmi_dist.batch import with_batch
from handlers.lmi_dist.facts import ModelFacts, read_facts
from handlers.lmi_dist.limits import Limits, choose_limits
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.memory import need_of, room_for_cache, say_memory
from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native_runner import (
    NativeRunner,
    block_bytes,
    bytes_of_file,
    kv_format,
    weight_bytes,
)
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.weights import stored_dtype
from lmi.errors import BadConfiguration, ModelUnusable, error_line
from lmi.executor import Progress
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

# A folder with a checkpoint, or a runner, which has its weights already.
Model: TypeAlias = str | os.PathLike[str] | Runner

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
def in_folder(model: Model | bytes, json_config_str: str | None) -> Iterator[Model]:
    """Write a model of bytes into a folder, which is there within the block. Any other model stays
    as it is.

    The bytes are those of one safetensors file, and `json_config_str` is the text of its
    config.json. Errors name these arguments, not the files.
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


def load_runner(model: Model, config: EngineConfig, progress: Progress) -> tuple[Runner, Limits]:
    """Load a model. Returns its runner and its limits.

    Raises ModelUnusable for a fault of its files, and BadConfiguration for an option that does not
    fit the model or the machine.
    """
    if not isinstance(model, str | os.PathLike):
        limits = choose_limits(config, model.context_length, model.tokens_per_block, token_bytes=1)
        return model, limits

    with refused_if_broken(os.fspath(model)):
        facts = read_facts(os.fspath(model))

    if facts.pooling is not None:
        _check_embedding(config)

    device = choose_device(config)
    library = choose_library(facts, device, config)
    with refused_if_broken(facts.path):
        if library is None:
            return _load_torch(facts, device, config, progress)

        return _load_native(facts, library, config, progress)


@contextmanager
def refused_if_broken(path: str) -> Iterator[None]:
    """Raise ModelUnusable for an error that comes of the model's files, so that nobody tries the
    load again: they are the same in each attempt.

    An error of the machine, as a lack of memory, passes.
    """
    try:
        yield
    except _FAULTS_OF_FILES as error:
        log.debug("the load failed", exc_info=True)
        raise ModelUnusable(f"{path}: the model cannot be loaded: {error_line(error)}") from error


def _check_embedding(config: EngineConfig) -> None:
    """Raise BadConfiguration for the options that an embedding model cannot have."""
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


def _load_native(
    facts: ModelFacts, library: Library, config: EngineConfig, progress: Progress
) -> tuple[Runner, Limits]:
    """Load a model for the native kernels, with a cache that fits beside it into memory."""
    tokens_per_block = NativeRunner.tokens_per_block
    bytes_of_block = library.block_bytes(
        facts.num_layers,
        facts.num_kv_heads,
        facts.head_dim,
        kv_format(library, config, stored_dtype(facts.path)),
    )
    token_bytes = bytes_of_block // tokens_per_block

    need = need_of(
        facts,
        config,
        bytes_of=partial(weight_bytes, facts, config),
        bytes_of_file=bytes_of_file(library, config, facts.path),
        bytes_of_blocks=block_bytes(library, config),
    )
    room_bytes = room_for_cache(facts, need, least_bytes=tokens_per_block * token_bytes)
    limits = choose_limits(
        config, facts.context_length, tokens_per_block, token_bytes, room_bytes=room_bytes
    )
    say_memory(need, limits.num_cache_tokens * token_bytes, limits.num_cache_tokens)

    started_s = time.monotonic()
    runner = NativeRunner(facts, library, config, limits, progress)
    limits = with_batch(limits, runner, config, time.monotonic() - started_s)
    # The largest steps that were measured are not those of an engine that waits.
    runner.memory.release_activations()
    return runner, limits


def _load_torch(
    facts: ModelFacts, device: str, config: EngineConfig, progress: Progress
) -> tuple[Runner, Limits]:
    """Load a model for torch, on a GPU or on the CPU."""
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
