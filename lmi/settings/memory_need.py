"""Estimates the memory of the host that a model needs, from its settings and the sizes and facts of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmi.settings.config import Config, EngineConfig
from lmi.settings.handler import Handler, announced
from lmi.shared import linux

MB = 1 << 20
PROCESS_BYTES = 300 * MB  # of an engine's process with its libraries
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2}  # of a number, by dtype
LARGER = 1.2  # weights in memory are larger than their files, because some are copied or laid out anew
UNKNOWN = Handler(load="")  # an engine that has no record
USUAL_SEQUENCES, USUAL_LENGTH = 64, 2048  # of the KV cache, where no option bounds it


def need_bytes(config: Config) -> int:
    """Return the bytes that all replicas of a model need together.

    It is `required_memory_mb`, or else an estimate. Where the weights and the cache lie on GPUs, only the processes
    count.
    """
    if config.model.required_memory_mb is not None:
        return config.model.required_memory_mb * MB
    engine = config.engine
    if engine.device_ids:
        return engine.num_engines * PROCESS_BYTES
    facts = _facts(Path(config.model.path))
    stored = str(facts.get("torch_dtype", facts.get("dtype")))
    of_weights, of_cache = announced().get(engine.handler, UNKNOWN).dtypes(engine, stored)
    widening = 1.0 if engine.quantize else max(1.0, _number_bytes(of_weights) / _number_bytes(stored))
    weights = int(LARGER * _weight_bytes(Path(config.model.path)) * widening)
    return engine.num_engines * (weights + _cache_bytes(engine, facts, _number_bytes(of_cache)) + PROCESS_BYTES)


def _facts(folder: Path) -> Mapping[str, Any]:
    """Return config.json, or nothing if it cannot be read, which the engine reports."""
    with suppress(OSError, ValueError, RecursionError):
        facts = json.loads((folder / "config.json").read_bytes())
        if isinstance(facts, dict):
            return facts
    return {}


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for pattern in WEIGHT_FILES for file in folder.glob(pattern))


def _number_bytes(dtype: str) -> int:
    """Return the size of a number. One of an unknown dtype, such as `auto`, has that of float32, which none exceeds."""
    return WEIGHT_BYTES.get(dtype, 4)


def _cache_bytes(engine: EngineConfig, facts: Mapping[str, Any], number_bytes: int) -> int:
    """Return the size of the KV cache: what the options say, else room for the usual requests, within a quarter."""
    token_bytes = _token_bytes(facts) * number_bytes
    if engine.max_kv_cache_tokens is not None:
        return engine.max_kv_cache_tokens * token_bytes
    longest = engine.max_sequence_length or _count(facts, "max_position_embeddings") or USUAL_LENGTH
    num_tokens = (engine.max_num_sequences or USUAL_SEQUENCES) * min(longest, USUAL_LENGTH)
    return min(num_tokens * token_bytes, linux.memory_bytes() // 4)


def _token_bytes(facts: Mapping[str, Any]) -> int:
    """Return the numbers that the cache keeps for each token."""
    num_heads = _count(facts, "num_attention_heads")
    head_dim = _count(facts, "head_dim") or _count(facts, "hidden_size") // max(1, num_heads)
    num_kept = _count(facts, "num_key_value_heads") or num_heads
    return 2 * _count(facts, "num_hidden_layers") * num_kept * head_dim


def _count(facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) and value > 0 else 0
