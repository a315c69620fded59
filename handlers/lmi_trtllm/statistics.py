"""The statistics that TensorRT-LLM keeps of its iterations, if it is asked to (`enable_iter_perf_stats`).

They come late and in JSON, with parts that may be missing. An iteration shows that the engine goes on while no request
gets a token, as in a long prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tensorrt_llm import LLM

from lmi.executor import KvCacheStats

WAIT_S = 0.5  # for statistics, before they are asked for again

log = logging.getLogger("lmi.trtllm")


class Statistics:
    """What is known of the iterations. The event loop writes it, and the executor's thread reads it."""

    def __init__(self) -> None:
        self.kv_cache = KvCacheStats()
        self._num_iterations = 0
        self._num_seen = 0

    def has_news(self) -> bool:
        """Whether there were iterations since the last call."""
        before, self._num_seen = self._num_seen, self._num_iterations
        return self._num_seen > before

    async def read(self, llm: LLM) -> None:
        """Read statistics until the task is cancelled. An error ends only this."""
        try:
            while True:
                async for one in llm.get_stats_async(timeout=WAIT_S):
                    self.take(one)
                await asyncio.sleep(WAIT_S)  # before the first request there are none, and it returns at once
        except Exception:
            log.warning("TensorRT-LLM reports no statistics any more", exc_info=True)

    def take(self, iteration: Mapping[str, object]) -> None:
        self._num_iterations += 1
        if isinstance(cache := iteration.get("kvCacheStats"), dict):
            self.kv_cache = KvCacheStats(
                max_num_blocks=_count(cache, "maxNumBlocks"),
                free_num_blocks=_count(cache, "freeNumBlocks"),
                used_num_blocks=_count(cache, "usedNumBlocks"),
                tokens_per_block=_count(cache, "tokensPerBlock"),
                alloc_total_blocks=_count(cache, "allocTotalBlocks"),
                alloc_new_blocks=_count(cache, "allocNewBlocks"),
                reused_blocks=_count(cache, "reusedBlocks"),
                missed_blocks=_count(cache, "missedBlocks"),
                cache_hit_rate=float(cache.get("cacheHitRate") or 0.0),
            )


def _count(values: Mapping[str, object], name: str) -> int:
    value = values.get(name)
    return int(value) if isinstance(value, int | float) else 0
