"""What a model needs of the machine's memory: before it is loaded, and between its steps.

The kernel ends a process that takes more than its control group may have, and it promises memory
without asking: only what is written counts. So the engine looks itself at what is left, before it
writes to memory that it never had.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from handlers.lmi_dist.arrays import BFLOAT16
from handlers.lmi_dist.defaults import MAX_NUM_SEQUENCES, MAX_PREFILL_TOKENS
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.linear_sites import Site, sites_of
from handlers.lmi_dist.plan import Plan, num_tokens_of
from handlers.lmi_dist.runner import BlockMemory
from handlers.lmi_dist.weights import quantised_types, stored_dtype
from lmi.errors import ModelUnusable
from lmi.executor import MemoryUse
from lmi.settings.config import EngineConfig
from lmi.shared import linux, machine
from lmi.shared.gguf_file import TensorType
from lmi.shared.machine import MB

# What the interpreter, its libraries, and what requests keep there take.
PROCESS_BYTES = 48 * MB
# The memory that stays free for other processes.
MARGIN_SHARE = 0.03
LEAST_MARGIN = 16 * MB
LARGEST_MARGIN = 256 * MB
# The time between two looks while steps are made.
LOOK_S = 1.0
LOOK_CLOSELY_S = 0.05
# If no more than so many margins are left, it looks closely.
NARROW = 4
# The longest time between two looks of an engine that makes no steps.
LOOK_IDLE_S = 60.0

log = logging.getLogger(__name__)

BytesOf: TypeAlias = Callable[[np.dtype[Any], tuple[int, int]], float]


class MemoryNeed(Struct, frozen=True):
    """The bytes that a model takes beside its KV cache."""

    weights: int
    # The activations of the largest usual step.
    steps: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        """All of these bytes."""
        return self.weights + self.steps + self.process


def need_of(
    facts: ModelFacts,
    config: EngineConfig,
    bytes_of: BytesOf,
    bytes_of_file: int | None = None,
    bytes_of_blocks: Callable[[TensorType], float] | None = None,
) -> MemoryNeed:
    """What a model with an architecture of ours needs.

    `bytes_of` says how many bytes a number of a weight takes, by the dtype that it has in the
    checkpoint, and by its shape (num_out, num_in). `bytes_of_file` is what the weights of a file
    take that stay as they are there. `bytes_of_blocks` says how many bytes a number of a quantised
    weight takes, by the type of its blocks; without it such weights become floats.
    """
    a = facts.architecture
    assert a is not None
    weights = bytes_of_file
    if weights is None:
        weights = _weight_bytes(facts, bytes_of, bytes_of_blocks)

    # Cosines and sines.
    length = min(config.max_sequence_length or facts.context_length, facts.context_length)
    rotaries = set(a.rotaries) - {None}
    num_rotated = sum(len(rotary.frequencies) for rotary in rotaries if rotary is not None)
    weights += length * num_rotated * 8

    return MemoryNeed(weights, _step_bytes(facts, config))


def _weight_bytes(
    facts: ModelFacts,
    bytes_of: BytesOf,
    bytes_of_blocks: Callable[[TensorType], float] | None,
) -> int:
    """The bytes of the packed linears and of the table of embeddings."""
    a = facts.architecture
    assert a is not None
    sites = sites_of(a)
    if facts.pooling is not None:
        # The last one is the head.
        sites = sites[:-1]

    stored = stored_dtype(facts.path)
    types = quantised_types(facts.path)
    weights = 0.0
    for site in sites:
        num_weights = sum(module.num_in * module.num_out for module in site.modules)
        blocks = _blocks_of_site(site, types)
        if not any(module.weight_name in types for module in site.modules):
            number_bytes = bytes_of(stored, (site.num_out, site.num_in))
        elif blocks is None or bytes_of_blocks is None:
            number_bytes = bytes_of(np.dtype(np.float32), (site.num_out, site.num_in))
        else:
            number_bytes = bytes_of_blocks(blocks)

        weights += num_weights * number_bytes

    # In these dtypes the table of embeddings stays in its file.
    if stored != BFLOAT16 and stored != np.float32:
        weights += a.vocab_size * (a.embedding_size or a.hidden_size) * 4

    return int(weights)


def _blocks_of_site(site: Site, types: Mapping[str, TensorType | None]) -> TensorType | None:
    """The type of a site's blocks, or None if a weight of it is in none: then all become floats."""
    types_of_site = {types.get(module.weight_name) for module in site.modules}
    return types_of_site.pop() if len(types_of_site) == 1 else None


def _step_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    """The activations of a step with as many prompt tokens and decodes as there may be."""
    a = facts.architecture
    assert a is not None
    num_decodes = config.max_num_sequences or MAX_NUM_SEQUENCES
    num_rows = num_decodes + (config.max_prefill_tokens or MAX_PREFILL_TOKENS)
    heads = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    width = 2 * a.hidden_size + heads + a.intermediate_size
    return 4 * (num_rows * width + num_decodes * (width + a.vocab_size))


def room_for_cache(facts: ModelFacts, need: MemoryNeed, least_bytes: int) -> int:
    """The bytes that the memory of this engine leaves for its KV cache.

    Raises ModelUnusable if that is less than `least_bytes`.
    """
    share = machine.share_bytes()
    room = share - need.total
    if room >= least_bytes:
        return room

    limit = machine.memory_limit()
    of_group = f" ({limit.source})" if limit.source else ""
    parts = (
        f"{need.weights // MB} MB for weights, {need.steps // MB} MB for steps, "
        f"{need.process // MB} MB for the process, "
        f"{-(-least_bytes // MB)} MB for keys and values at least"
    )
    raise ModelUnusable(
        f"{facts.path}: the model does not fit into memory: "
        f"it needs {(need.total + least_bytes) // MB} MB ({parts}), and "
        f"{max(0, share) // MB} MB are left for it of {limit.num_bytes // MB} MB{of_group}"
    )


def say_memory(need: MemoryNeed, cache_bytes: int, num_cache_tokens: int) -> None:
    """Log what the machine has, and what the model takes of it."""
    log.info(
        "memory: weights %d MB, steps %d MB, KV cache %d MB at most (%d tokens); %s",
        need.weights // MB,
        need.steps // MB,
        cache_bytes // MB,
        num_cache_tokens,
        machine.describe(),
    )


class HeldMemory(Struct, frozen=True):
    """What a loaded model holds of the memory. Any thread may ask."""

    weight_bytes: int
    block_bytes: int
    cache: KvCache

    def use(self) -> MemoryUse:
        """Return it as it is now."""
        num_blocks = self.cache.num_blocks
        num_touched = num_blocks - self.cache.num_new
        return MemoryUse(
            weights=self.weight_bytes,
            kv_cache_reserved=num_blocks * self.block_bytes,
            kv_cache_touched=num_touched * self.block_bytes,
        )

    def say(self) -> None:
        """Log it, with what else the process has."""
        use = self.use()
        rest = linux.process_bytes() - use.weights - use.kv_cache_touched
        log.info(
            "memory in use: weights %d MB, KV cache %d MB of %d MB, the rest %d MB",
            use.weights // MB,
            use.kv_cache_touched // MB,
            use.kv_cache_reserved // MB,
            max(0, rest) // MB,
        )


class MemoryWatch:
    """Keeps the blocks of a KV cache within the memory that is left, look by look.

    While memory is short no block is written that never was, and cached blocks that nobody uses go
    back to the system.
    """

    def __init__(
        self,
        cache: KvCache,
        memory: BlockMemory,
        usual_step_bytes: int,
        *,
        idle_timeout_s: float | None = None,
        memory_bytes: int | None = None,
        free_bytes: Callable[[], int] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`usual_step_bytes`: of the activations in a step with as many prompt tokens and decodes
        as there may be. `idle_timeout_s`: blocks that nobody has used for so long go back to the
        system even if memory is not short. The cache must have the same clock. `memory_bytes` and
        `free_bytes` are the machine's, unless they are given.
        """
        self._cache = cache
        self._memory = memory
        self._usual_step_bytes = usual_step_bytes
        self._idle_timeout_s = idle_timeout_s
        self._free_bytes = free_bytes or machine.free_bytes
        self._now_s = now_s

        share = int(MARGIN_SHARE * (memory_bytes or machine.memory_bytes()))
        self._margin = min(max(share, LEAST_MARGIN), LARGEST_MARGIN)
        # The bytes of the activations in the largest step so far.
        self._written_bytes = 0
        self._next_look_s = 0.0
        # When a step was made last.
        self._last_step_s = now_s()

    @property
    def idle_look_s(self) -> float | None:
        """The time to the next look while no step is made, or None if none is needed."""
        if self._idle_timeout_s is None or self._cache.num_new == self._cache.num_blocks:
            return None

        return min(self._idle_timeout_s, LOOK_IDLE_S)

    def look_while_idle(self) -> None:
        """Give back what nobody has used for long."""
        if self._idle_timeout_s is None:
            return

        since_s = self._now_s() - self._idle_timeout_s
        blocks = self._cache.give_back_idle(since_s, with_empty=self._last_step_s <= since_s)
        self._memory.give_back(blocks)

    def look(self) -> None:
        """Set how many new blocks may be written, if it is time.

        Call it before a step is scheduled.
        """
        now_s = self._now_s()
        self._last_step_s = now_s
        if now_s < self._next_look_s:
            return

        self.look_while_idle()
        for_steps = max(0, self._usual_step_bytes - self._written_bytes)
        spare = self._free_bytes() - self._margin - for_steps
        if spare < 0:
            num_blocks = -(spare // self._memory.block_bytes)
            self._memory.give_back(self._cache.give_back(num_blocks))

        num_allowed = max(0, spare // self._memory.block_bytes)
        self._cache.withhold(self._cache.num_new - num_allowed)
        is_narrow = spare < NARROW * self._margin or num_allowed < self._cache.num_new
        self._next_look_s = now_s + (LOOK_CLOSELY_S if is_narrow else LOOK_S)

    def check(self, plan: Plan) -> None:
        """Raise MemoryError if the step of a plan would write more than is left beside a part of
        the margin.
        """
        num_logits = sum(chunk.num_logits for chunk in plan.chunks)
        num_bytes = self._memory.step_bytes(num_tokens_of(plan.chunks), num_logits)
        more = num_bytes - self._written_bytes
        if more <= 0:
            return

        free = self._free_bytes()
        if free - more < self._margin // 2:
            raise MemoryError(f"a step needs {more // MB} MB more, and {free // MB} MB are left")

        self._written_bytes = num_bytes
