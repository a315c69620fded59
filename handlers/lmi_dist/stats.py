"""What the statistics of a step say of its batch and of the KV cache."""

from __future__ import annotations

from handlers.base.stepped import Step
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.plan import num_tokens_of
from handlers.lmi_dist.scheduler import Batch
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import InflightBatchingStats, KvCacheStats


def step_of(batch: Batch, touched: list[EmbeddedSequence]) -> Step[EmbeddedSequence]:
    """The step that has computed a batch, and given these sequences a token or an error."""
    batching = _batching_stats(batch)
    return Step(
        touched,
        batching=batching,
        num_context_tokens=batching.num_ctx_tokens,
        num_generation_tokens=len(batch.plan.decodes),
        num_reused_tokens=batch.num_reused_tokens,
        num_preemptions=batch.num_preemptions,
    )


def _batching_stats(batch: Batch) -> InflightBatchingStats:
    num_decodes = len(batch.plan.decodes)
    generating = {sequence.id for sequence in batch.sequences[:num_decodes]}
    prefilling = {sequence.id for sequence in batch.sequences[num_decodes:]}
    return InflightBatchingStats(
        num_scheduled_requests=len(generating | prefilling),
        num_context_requests=len(prefilling),
        num_gen_requests=len(generating),
        num_ctx_tokens=num_tokens_of(batch.plan.prefills),
    )


def kv_cache_stats(cache: KvCache) -> KvCacheStats:
    return KvCacheStats(
        max_num_blocks=cache.num_blocks,
        free_num_blocks=cache.num_free_blocks,
        used_num_blocks=cache.num_used_blocks,
        tokens_per_block=cache.tokens_per_block,
        alloc_total_blocks=cache.num_new_blocks + cache.num_reused_blocks,
        alloc_new_blocks=cache.num_new_blocks,
        reused_blocks=cache.num_reused_blocks,
        missed_blocks=cache.num_missed_blocks,
        cache_hit_rate=cache.hit_rate,
    )
