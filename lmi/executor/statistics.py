"""The statistics of an engine: of each step, of each request, and of the KV cache."""

from __future__ import annotations

import msgspec


class KvCacheStats(msgspec.Struct, kw_only=True):
    """Blocks that can be reused and that nobody uses count as free. The last five are of the time since the start.

    `missed_blocks` are those of prompts that were not found, and `cache_hit_rate` is the share of those that were.
    """

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0  # new and reused
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


class InflightBatchingStats(msgspec.Struct, kw_only=True):
    """The requests of one step: those that computed prompt tokens and those that computed tokens of an answer."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_ctx_tokens: int = 0


class IterationStats(msgspec.Struct, kw_only=True):
    """One step of the engine. It counts requests unless a name says otherwise.

    Upstream has no `num_preemptions` and no `num_reused_tokens`. An engine that does not say which requests ran in a
    step has no `inflight_batching_stats`.
    """

    timestamp: float = 0.0  # time.monotonic() at the end of the step
    iter: int = 0
    iter_latency_ms: float = 0.0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    num_reused_tokens: int = 0  # that prompts found in the cache
    num_preemptions: int = 0  # in this step
    kv_cache_stats: KvCacheStats = msgspec.field(default_factory=KvCacheStats)
    inflight_batching_stats: InflightBatchingStats | None = None


class RequestStats(msgspec.Struct, kw_only=True):
    """The state of one request at the end of one step."""

    id: int
    stage: str  # QUEUED, CONTEXT_IN_PROGRESS, GENERATION_IN_PROGRESS, GENERATION_COMPLETE
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    scheduled: bool = False
    paused: bool = False


class RequestStatsPerIteration(msgspec.Struct, kw_only=True):
    iter: int
    request_stats: list[RequestStats]
