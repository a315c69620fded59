"""How many ranks an engine has, on how many nodes, and which GPUs they use. It does not import tensorrt_llm."""

from __future__ import annotations

from lmi.settings.config import EngineConfig
from lmi.settings.machine import num_ranks_here


def num_ranks(config: EngineConfig) -> int:
    """The ranks of one engine, on all nodes."""
    context = config.options.get("context_parallel_size", "")
    num_context = int(context) if context.isdecimal() else 1
    return config.tensor_parallel_degree * config.pipeline_parallel_degree * max(1, num_context)


def num_nodes(config: EngineConfig) -> int:
    text = config.options.get("nnodes", "")
    return max(1, int(text)) if text.isdecimal() else 1


def num_ranks_on_a_node(config: EngineConfig) -> int:
    return num_ranks_here(num_ranks(config), str(num_nodes(config)))


def gpus_of(config: EngineConfig, slot: int) -> tuple[str, ...]:
    """The GPUs of this machine that the ranks of one engine use."""
    num_each = len(config.device_ids) // config.num_engines
    return config.device_ids[slot * num_each : (slot + 1) * num_each]
