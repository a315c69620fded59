"""What the engines do, in the log."""

import logging
from collections.abc import Iterable

from lmi.shared.state import EngineRecord

# The log names the module that its readers know.
log = logging.getLogger("lmi.supervisor.banner")


class Throughput:
    """Logs what the engines of all models did, every `interval_s` in which they did something,
    never if it is None.
    """

    def __init__(self, interval_s: float | None, now: float) -> None:
        self._interval_s = interval_s
        self._looked_s = now
        # The tokens until then.
        self._num_prefilled = 0
        self._num_decoded = 0

    def look(self, engines: Iterable[EngineRecord], now: float) -> None:
        """Log what was done since the last line, if it is time for the next."""
        seconds = now - self._looked_s
        if self._interval_s is None or seconds < self._interval_s:
            return

        records = list(engines)
        num_prefilled = sum(record.num_context_tokens for record in records)
        num_decoded = sum(record.num_generation_tokens for record in records)
        # A model that was unloaded took its totals with it.
        num_new_prefilled = max(0, num_prefilled - self._num_prefilled)
        num_new_decoded = max(0, num_decoded - self._num_decoded)
        self._looked_s = now
        self._num_prefilled = num_prefilled
        self._num_decoded = num_decoded

        work = {
            "prefill_tokens_per_s": round(num_new_prefilled / seconds, 1),
            "decode_tokens_per_s": round(num_new_decoded / seconds, 1),
            "running": sum(record.num_running for record in records),
            "waiting": sum(record.num_waiting for record in records),
        }
        if not any(work.values()):
            return

        num_used_blocks = sum(record.num_used_blocks for record in records)
        max_num_blocks = sum(record.max_num_blocks for record in records)
        usage = num_used_blocks / max(1, max_num_blocks)
        log.info("throughput", extra={**work, "kv_cache_usage": round(usage, 3)})
