"""One sequence of a request on its way through an engine: its tokens, its progress, and why it ended.

The sequences of one request share a `Group`: each ends by itself, and all fail together. Every `SteppedExecutor` uses
this module. It is plain Python and knows nothing of scheduling rules, tensors or text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from handlers.base.randomness import fresh_seed
from lmi.executor import (
    MAX_SEED,
    ErrorKind,
    FinishReason,
    PromptLogProb,
    Request,
    RequestPerfMetrics,
    Response,
    ResponseError,
    Result,
    TokenLogProb,
)


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request, and how many last Responses it still owes. The one that leaves 0 is final."""

    num_owed: int
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` are prompt and output together; `num_computed` of them have keys and values in cache slot `slot`.

    `num_prefill` tokens are computed as prompt chunks: the prompt, or after a preemption all tokens known by then. A
    sequence is live until `finish_reason` or `error` is set.
    """

    id: int  # of the request
    index: int  # among the sequences of the request
    num_copies: int  # greedy sequences of a request are equal: one is computed and answered this many times
    group: Group
    request: Request
    min_tokens: int
    max_tokens: int  # the request's, shortened to what the context has room for
    seed: int
    deadline: float | None  # time.monotonic()
    token_ids: list[int]
    num_prompt_tokens: int
    num_prefill: int
    end_ids: frozenset[int]
    stop_words: dict[int, list[list[int]]]  # by their last token
    num_computed: int = 0
    num_cached_tokens: int = 0  # of the prompt, those whose keys and values were in the cache
    slot: int | None = None
    num_sent: int = 0  # generated tokens that Responses have carried
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    top_log_probs: list[list[TokenLogProb]] = field(default_factory=list)
    prompt_log_probs: list[PromptLogProb] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    error: ResponseError | None = None
    perf_metrics: RequestPerfMetrics | None = None  # where the request wants them
    sampler_state: object = None  # what a sampler knows of this sequence, a type of the sampler
    drafter: object = None  # what drafts its next tokens, a type of the engine

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prefill

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not FinishReason.NOT_FINISHED or self.error is not None

    @property
    def lacks_prompt_log_probs(self) -> bool:
        wanted = self.index == 0 and self.request.output_config.num_prompt_log_probs is not None
        return wanted and len(self.prompt_log_probs) < self.num_prompt_tokens

    def append(self, token_id: int, log_prob: float | None = None, top: list[TokenLogProb] | None = None) -> None:
        """Append a generated token. Sets `finish_reason` if it is the last."""
        self.token_ids.append(token_id)
        if self.perf_metrics is not None:
            self._note_time(self.perf_metrics)
        if self.request.output_config.return_log_probs and log_prob is not None:
            self.log_probs.append(log_prob)
            self.cum_log_prob += log_prob
        if top is not None:
            self.top_log_probs.append(top)
        self.finish_reason = self._reason_after(token_id)

    @staticmethod
    def _note_time(metrics: RequestPerfMetrics) -> None:
        metrics.last_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = metrics.last_token_time

    def _reason_after(self, token_id: int) -> FinishReason:
        """The precedence is END_ID, STOP_WORDS, LENGTH. Up to `min_tokens` only the length ends a sequence."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        if num_generated > self.min_tokens:
            if token_id in self.end_ids and not self.request.ignore_eos:
                return FinishReason.END_ID
            if token_id in self.stop_words and self._ends_with_stop_word(token_id, num_generated):
                return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if num_generated >= self.max_tokens else FinishReason.NOT_FINISHED

    def _ends_with_stop_word(self, token_id: int, num_generated: int) -> bool:
        words = self.stop_words[token_id]
        return any(len(word) <= num_generated and self.token_ids[-len(word) :] == word for word in words)

    def finish(self, reason: FinishReason) -> None:
        """End a cancelled or timed-out sequence. Tokens that no Response has carried are dropped, as upstream does."""
        self.finish_reason = reason
        del self.token_ids[self.num_prompt_tokens + self.num_sent :]
        del self.log_probs[self.num_sent :]
        self.cum_log_prob = sum(self.log_probs)
        del self.top_log_probs[self.num_sent :]

    def fail(self, message: str, kind: ErrorKind = ErrorKind.GENERATION, field: str | None = None) -> None:
        """End every sequence of the request with an error."""
        for sequence in self.group.sequences:
            sequence.error = ResponseError(message, kind, field)

    def reuse(self, num_tokens: int) -> None:
        """Take keys and values of the first `num_tokens` from the cache."""
        if self.num_generated == 0:
            self.count_cached(self.num_cached_tokens + num_tokens - self.num_computed)
        self.num_computed = num_tokens

    def count_cached(self, num_tokens: int) -> None:
        self.num_cached_tokens = num_tokens
        if self.perf_metrics is not None:
            self.perf_metrics.num_reused_tokens = num_tokens

    def restart(self) -> None:
        """Start over after a preemption: all tokens known so far become the prompt to recompute."""
        self.slot, self.num_computed, self.num_prefill = None, 0, self.num_tokens
        if self.num_generated == 0:
            self.count_cached(0)
        if self.lacks_prompt_log_probs:
            self.prompt_log_probs.clear()

    def take_responses(self) -> Iterator[Response]:
        """Yield the new Responses. A request that is not streamed gets them at the end; a failed one gets one error."""
        request = self.request
        if self.error is not None:
            if self.group.num_owed:
                self.group.num_owed = 0
                yield Response(self.id, error=self.error, client_id=request.client_id)
        elif request.streaming or self.is_finished:
            start, self.num_sent = self.num_sent, self.num_generated
            for copy in range(self.num_copies):
                self.group.num_owed -= self.is_finished
                yield Response(self.id, result=self._result(start, self.index + copy), client_id=request.client_id)

    def _result(self, num_sent: int, index: int) -> Result:
        """The Result with the tokens that no Response has carried yet, or with all tokens if the request wants them."""
        request, output = self.request, self.request.output_config
        start = 0 if request.return_all_generated_tokens else num_sent
        token_ids = self.token_ids[self.num_prompt_tokens + start :]
        if not request.streaming and not output.exclude_input_from_output:
            token_ids = self.token_ids[:]
        is_first = index == num_sent == 0 and not self.lacks_prompt_log_probs
        return Result(
            output_token_ids=[token_ids],
            is_final=self.group.num_owed == 0,
            is_sequence_final=self.is_finished,
            sequence_index=index,
            finish_reasons=[self.finish_reason],
            log_probs=[self.log_probs[start:]] if output.return_log_probs else None,
            cum_log_probs=[self.cum_log_prob] if output.return_log_probs else None,
            top_log_probs=[self.top_log_probs[start:]] if output.num_top_log_probs else None,
            prompt_log_probs=self.prompt_log_probs if is_first and output.num_prompt_log_probs is not None else None,
            request_perf_metrics=self.perf_metrics if self.is_finished else None,
            num_cached_tokens=0 if num_sent else self.num_cached_tokens,
        )


def new_sequences(request_id: int, request: Request, max_sequence_length: int) -> list[Sequence]:
    """The sequences of a request that was just accepted. Its arrival time, deadline and seeds are set here.

    Sequence i uses seed + i. A greedy request has one sequence, which is answered `num_return_sequences` times.
    """
    sampling, num_prompt_tokens = request.sampling_config, len(request.input_token_ids)
    num_copies = sampling.num_return_sequences if sampling.is_greedy else 1
    arrival_time = time.monotonic()
    seed = fresh_seed() if sampling.seed is None else sampling.seed
    deadline = None if request.allotted_time_ms is None else arrival_time + request.allotted_time_ms / 1000
    has_metrics = request.output_config.return_perf_metrics
    stop_words: dict[int, list[list[int]]] = {}
    for word in request.stop_words:
        stop_words.setdefault(word[-1], []).append(list(word))
    group = Group(num_owed=sampling.num_return_sequences)
    for index in range(sampling.num_return_sequences // num_copies):
        sequence = Sequence(
            id=request_id,
            index=index,
            num_copies=num_copies,
            group=group,
            request=request,
            min_tokens=sampling.min_tokens or 0,
            max_tokens=min(request.max_tokens, max_sequence_length - num_prompt_tokens),
            seed=(seed + index) % (MAX_SEED + 1),
            deadline=deadline,
            token_ids=list(request.input_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            num_prefill=num_prompt_tokens,
            end_ids=frozenset(request.end_ids) | ({request.end_id} if request.end_id is not None else set()),
            stop_words=stop_words,
            perf_metrics=RequestPerfMetrics(arrival_time=arrival_time) if has_metrics else None,
        )
        group.sequences.append(sequence)
    return group.sequences
