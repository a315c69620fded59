"""One sequence of a request on its way through an engine: its tokens, its progress, and why it
ended.

The sequences of one request share a `Group`: each ends by itself, and all fail together. This
module is plain Python and knows no scheduling rules, models or text: `sequence.py` has what engines
with a model add.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

from lmi.executor.request import MAX_SEED, Request
from lmi.executor.response import (
    ErrorKind,
    FinishReason,
    PromptLogProb,
    RequestPerfMetrics,
    Response,
    ResponseError,
    Result,
    TokenLogProb,
)

AnySequence = TypeVar("AnySequence", bound="TokenSequence")

# To look it up in its class takes as long as the rest of `is_finished`.
_NOT_FINISHED = FinishReason.NOT_FINISHED


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request."""

    # How many answers are not at their end. The last Response of the last one is final.
    num_owed: int
    sequences: "list[TokenSequence]" = field(default_factory=list)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence of tokens, which is live until `finish_reason` or `error` is set."""

    # The id of the request.
    id: int
    # Its place among the sequences of the request.
    index: int
    # How many answers it is: greedy sequences of a request are equal, so one is computed for all.
    num_copies: int
    group: Group
    request: Request
    min_tokens: int
    # The limit of the request, shortened to what the context has room for.
    max_tokens: int
    seed: int
    # A time of `time.monotonic()`.
    deadline: float | None
    # Prompt and output together.
    token_ids: list[int]
    num_prompt_tokens: int
    # How many tokens are computed as chunks of a prompt: those of the prompt, or after a preemption
    # all that were known by then.
    num_prefill: int
    # The place of the first token of an answer, which may begin with the prompt.
    first_told: int
    end_ids: frozenset[int]
    # The stop words by their last token.
    stop_words: dict[int, list[list[int]]]
    # How many of the tokens the engine has computed.
    num_computed: int = 0
    # Tokens of the prompt whose keys and values were in the cache, in whole parts.
    num_cached_tokens: int = 0
    # Generated tokens that Responses have carried.
    num_sent: int = 0
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    top_log_probs: list[list[TokenLogProb]] = field(default_factory=list)
    prompt_log_probs: list[PromptLogProb] = field(default_factory=list)
    finish_reason: FinishReason = _NOT_FINISHED
    error: ResponseError | None = None
    # Set where the request asks for them.
    perf_metrics: RequestPerfMetrics | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """The number of tokens of the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens are left that are computed as prompt chunks."""
        return self.num_computed < self.num_prefill

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, with an error or without."""
        return self.finish_reason is not _NOT_FINISHED or self.error is not None

    @property
    def siblings(self) -> list[Self]:
        """All sequences of the request, in the order of their indices; it is among them."""
        return cast("list[Self]", self.group.sequences)

    @property
    def lacks_prompt_log_probs(self) -> bool:
        """Whether the request wants log-probs of its prompt that are still to be computed."""
        if self.index != 0 or self.request.output_config.num_prompt_log_probs is None:
            return False

        return len(self.prompt_log_probs) < self.num_prompt_tokens

    def append(
        self, token_id: int, log_prob: float | None = None, top: list[TokenLogProb] | None = None
    ) -> None:
        """Append a generated token. Sets `finish_reason` if it is the last."""
        self.token_ids.append(token_id)
        self._note_time()
        if log_prob is not None and self.request.output_config.return_log_probs:
            self.log_probs.append(log_prob)
            self.cum_log_prob += log_prob

        if top is not None:
            self.top_log_probs.append(top)

        self.finish_reason = self.reason_after(self.token_ids, self.num_generated)

    def _note_time(self) -> None:
        """Note that a token was generated now."""
        metrics = self.perf_metrics
        if metrics is None:
            return

        metrics.last_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = metrics.last_token_time

    def reason_after(self, token_ids: list[int], num_generated: int) -> FinishReason:
        """Return why a sequence ends behind these tokens, or NOT_FINISHED.

        The last `num_generated` of them were generated. END_ID comes before STOP_WORDS, and these
        before LENGTH. Up to `min_tokens` only the length ends a sequence.
        """
        token_id = token_ids[-1]
        if num_generated > self.min_tokens:
            if token_id in self.end_ids and not self.request.ignore_eos:
                return FinishReason.END_ID

            for word in self.stop_words.get(token_id, ()):
                if len(word) <= num_generated and token_ids[-len(word) :] == word:
                    return FinishReason.STOP_WORDS

        if num_generated >= self.max_tokens:
            return FinishReason.LENGTH

        return _NOT_FINISHED

    def finish(self, reason: FinishReason) -> None:
        """End a cancelled or timed-out sequence. Tokens that no Response has carried are dropped,
        as upstream does.
        """
        self.finish_reason = reason
        del self.token_ids[self.num_prompt_tokens + self.num_sent :]
        del self.log_probs[self.num_sent :]
        self.cum_log_prob = sum(self.log_probs)
        del self.top_log_probs[self.num_sent :]

    def fail(
        self, message: str, kind: ErrorKind = ErrorKind.GENERATION, field: str | None = None
    ) -> None:
        """End every sequence of the request with an error."""
        for sequence in self.group.sequences:
            sequence.error = ResponseError(message, kind, field)

    def take_responses(self) -> list[Response]:
        """Return the new Responses, one for each copy.

        A request that is not streamed gets them at its end. A failed one gets a single error.
        """
        request = self.request
        if self.error is not None:
            if self.group.num_owed == 0:
                return []

            self.group.num_owed = 0
            return [Response(self.id, error=self.error, client_id=request.client_id)]

        is_finished = self.finish_reason is not _NOT_FINISHED
        start = self.num_sent
        end = len(self.token_ids) - self.num_prompt_tokens
        if not is_finished and (end <= start or not request.streaming):
            return []

        self.num_sent = end
        responses = []
        for index in range(self.index, self.index + self.num_copies):
            if is_finished:
                self.group.num_owed -= 1

            result = self._result(start, index)
            is_first = start == 0 and index == 0
            if is_first and request.output_config.num_prompt_log_probs is not None:
                if not self.lacks_prompt_log_probs:
                    result.prompt_log_probs = self.prompt_log_probs

            if is_finished:
                result.request_perf_metrics = self.perf_metrics

            responses.append(Response(self.id, result, None, request.client_id))

        return responses

    def _result(self, num_sent: int, index: int) -> Result:
        """Return the Result of copy `index` behind `num_sent` tokens that Responses have carried,
        or with all tokens if the request wants them.
        """
        output = self.request.output_config
        reason = self.finish_reason
        is_final = self.group.num_owed == 0
        start = 0 if self.request.return_all_generated_tokens else num_sent
        token_ids = self.token_ids[self.first_told + start :]
        result = Result([token_ids], is_final, reason is not _NOT_FINISHED, index, [reason])
        if output.return_log_probs:
            result.log_probs = [self.log_probs[start:]]
            result.cum_log_probs = [self.cum_log_prob]

        if output.num_top_log_probs:
            result.top_log_probs = [self.top_log_probs[start:]]

        return result


def sequences_of(
    kind: type[AnySequence], request_id: int, request: Request, max_sequence_length: int
) -> list[AnySequence]:
    """Return the sequences of a request that was just accepted.

    A request has a sequence for each of its `num_return_sequences` answers, and sequence i uses
    seed + i. A greedy request has one sequence, which is answered so many times. A request with
    beams has one sequence and one answer.
    """
    sampling = request.sampling_config
    num_prompt_tokens = len(request.input_token_ids)
    num_answers = 1 if sampling.beam_width > 1 else sampling.num_return_sequences
    num_copies = num_answers if sampling.is_greedy else 1

    arrival_time = time.monotonic()
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    deadline = None
    if request.allotted_time_ms is not None:
        deadline = arrival_time + request.allotted_time_ms / 1000

    has_metrics = request.output_config.return_perf_metrics
    excludes_prompt = request.output_config.exclude_input_from_output

    end_ids = frozenset(request.end_ids)
    if request.end_id is not None:
        end_ids |= {request.end_id}

    stop_words: dict[int, list[list[int]]] = {}
    for word in request.stop_words:
        stop_words.setdefault(word[-1], []).append(list(word))

    group = Group(num_owed=num_answers)
    sequences = []
    for index in range(num_answers // num_copies):
        sequence = kind(
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
            first_told=num_prompt_tokens if request.streaming or excludes_prompt else 0,
            end_ids=end_ids,
            stop_words=stop_words,
            perf_metrics=RequestPerfMetrics(arrival_time=arrival_time) if has_metrics else None,
        )
        sequences.append(sequence)

    group.sequences += sequences
    return sequences
