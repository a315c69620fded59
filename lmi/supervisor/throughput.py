"""The line of the log about what the engines of all models do, one for each interval in which they do something."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lmi.shared.state import EngineRecord

log = logging.getLogger(__name__)


class Throughput:
    """Writes the line every `interval_s`, or never if that is None."""

    def __init__(self, interval_s: float | None, now: float) -> None:
        self._interval_s = interval_s
        self._looked_s = now
        self._num_prefilled = self._num_decoded = 0  # tokens, until then

    def look(self, engines: Iterable[EngineRecord], now: float) -> None:
        seconds = now - self._looked_s
        if self._interval_s is None or seconds < self._interval_s:
            return
        records, before = list(engines), (self._num_prefilled, self._num_decoded)
        self._looked_s = now
        self._num_prefilled = sum(record.num_context_tokens for record in records)
        self._num_decoded = sum(record.num_generation_tokens for record in records)
        max_num_blocks = sum(record.max_num_blocks for record in records)
        work = {  # a model that was unloaded took its totals with it
            "prefill_tokens_per_s": round(max(0, self._num_prefilled - before[0]) / seconds, 1),
            "decode_tokens_per_s": round(max(0, self._num_decoded - before[1]) / seconds, 1),
            "running": sum(record.num_running for record in records),
            "waiting": sum(record.num_waiting for record in records),
        }
        if any(work.values()):
            usage = sum(record.num_used_blocks for record in records) / max(1, max_num_blocks)
            log.info("throughput", extra={**work, "kv_cache_usage": round(usage, 3)})
