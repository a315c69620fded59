"""The statistics of one answer: its tokens, the time to the first, the time between tokens, and why
it ended.

`respond.generate` counts each Delta here. The totals go to the record of the front end, whose
fields are metrics, to the line of the log, and to the spans of the request.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Self

from lmi.executor import RequestPerfMetrics
from lmi.pipeline import comes_in_parts
from lmi.shared.state import FrontEndRecord
from lmi.types import Delta, GenerationRequest


class AnswerStats:
    """Counts one answer while it is generated.

    If any of its sequences comes in parts, tokens are timed here, when they come. If all come
    whole, the engine has timed their tokens. It counts every token, so it uses views and plain
    numbers, and writes the totals when the answer ends. An answer that has failed or was cancelled
    adds neither its time nor its lengths.

    `log_fields` are those of the request in the log: they get the numbers of tokens and the time to
    the first one. Spans are made of the public fields, whose times are those of time.monotonic().
    """

    def __init__(
        self,
        record: FrontEndRecord,
        started_s: float,
        log_fields: defaultdict[str, float],
        requests: Sequence[GenerationRequest],
        model: str,
    ) -> None:
        self.requests = requests
        self.model = model

        self.started_s = started_s
        self.first_token_s = math.inf
        self.last_token_s = started_s
        self.ended_s = started_s
        # As the engine measured them, of sequences that have ended.
        self.times: list[RequestPerfMetrics] = []

        # The number of tokens of each sequence, by its index.
        self.lengths: defaultdict[int, int] = defaultdict(int)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        # An AnswerEnd, "error" or "cancelled".
        self.outcome = "cancelled"

        self._is_timed_here = any(map(comes_in_parts, requests))
        self._record = record
        self._log_fields = log_fields
        self._inter_token_latency_s = record.inter_token_latency_s

    def __enter__(self) -> Self:
        return self

    def count(self, delta: Delta) -> None:
        num_tokens = len(delta.tokens)
        if num_tokens:
            if self._is_timed_here:
                self._time_tokens(num_tokens)

            self.lengths[delta.index] += num_tokens

        if delta.num_prompt_tokens:
            self._count_prompt(delta)

        if delta.times is not None:
            self.times.append(delta.times)
            if not self._is_timed_here:
                self._read_times(delta.times, num_tokens)

        if delta.finish_reason is not None:
            self.outcome = delta.finish_reason

    def _time_tokens(self, num_tokens: int) -> None:
        """Time tokens that come now, before they are counted."""
        now_s = time.monotonic()
        has_first_token = bool(self.lengths)
        if has_first_token:
            mean_s = (now_s - self.last_token_s) / num_tokens
            self._inter_token_latency_s.observe(mean_s, num_tokens)
        else:
            self._note_first_token(now_s)

        self.last_token_s = now_s

    def _count_prompt(self, delta: Delta) -> None:
        """Count the tokens of a prompt, which the first Delta of a request tells."""
        num_tokens = delta.num_prompt_tokens
        num_cached = delta.num_cached_tokens
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached

        self._record.prompt_length.observe(num_tokens)
        self._record.prefill_length.observe(num_tokens - num_cached)
        self._record.num_prompt_tokens += num_tokens
        self._record.num_cached_tokens += num_cached

        self._log_fields["prompt_tokens"] += num_tokens
        self._log_fields["cached_tokens"] += num_cached

    def _read_times(self, times: RequestPerfMetrics, num_tokens: int) -> None:
        """Take the times of a whole sequence from its engine, where it has measured them."""
        first_s = times.first_token_time
        last_s = times.last_token_time
        if first_s is None or last_s is None:
            return

        if num_tokens > 1 and first_s == last_s:
            # An engine's own search gives all tokens at its end.
            return

        self.first_token_s = min(self.first_token_s, first_s)
        self.last_token_s = max(self.last_token_s, last_s)
        if num_tokens > 1:
            mean_s = (last_s - first_s) / (num_tokens - 1)
            self._inter_token_latency_s.observe(mean_s, num_tokens - 1)

    def _note_first_token(self, first_s: float) -> None:
        self.first_token_s = first_s
        wait_s = first_s - self.started_s
        self._record.time_to_first_token_s.observe(wait_s)
        self._log_fields.setdefault("ttft_ms", round(wait_s * 1000, 1))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.ended_s = time.monotonic()
        # A cancelled task raises no Exception.
        if isinstance(error, Exception):
            self.outcome = "error"

        if not self._is_timed_here and self.first_token_s < math.inf:
            self._note_first_token(self.first_token_s)

        num_tokens = sum(self.lengths.values())
        self._record.num_generated_tokens += num_tokens
        self._log_fields["generated_tokens"] += num_tokens
        if kind is None:
            self._count_whole_answer()

        self._record.num_finished.add(self.outcome)

    def _count_whole_answer(self) -> None:
        """Count the time and the lengths of an answer that neither failed nor was cancelled."""
        self._record.answer_time_s.observe(self.ended_s - self.started_s)
        longest = max(self.lengths.values(), default=0)
        self._record.longest_sequence.observe(longest)
        if longest > 1 and self.last_token_s > self.first_token_s:
            mean_s = (self.last_token_s - self.first_token_s) / (longest - 1)
            self._record.time_per_output_token_s.observe(mean_s)

        for length in self.lengths.values():
            self._record.sequence_length.observe(length)
