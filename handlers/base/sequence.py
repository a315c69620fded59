"""One sequence of a request on its way through an engine: its tokens, its progress, and why it ended.

The sequences of one request share a `Group`: each ends by itself, and all fail together. This module is plain Python
and knows nothing of scheduling rules, tensors or text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

from handlers.base.beams import AnyCandidate, Beam, BeamSearch, Continuation
from handlers.base.captured import Captured, new_captured
from lmi.errors import PromptTooLong
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
    Tensor,
    TokenLogProb,
)

AnySequence = TypeVar("AnySequence", bound="Sequence")

_NOT_FINISHED = FinishReason.NOT_FINISHED  # to look it up in its class takes as long as the rest of `is_finished`


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

    A request with beams is one sequence, whose output is that of the best running beam.
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
    first_told: int  # the first token of an answer: that of the prompt where the answer begins with it
    end_ids: frozenset[int]
    stop_words: dict[int, list[list[int]]]  # by their last token
    num_computed: int = 0
    num_cached_tokens: int = 0  # of the prompt, those whose keys and values were in the cache, in whole parts
    slot: int | None = None
    num_sent: int = 0  # generated tokens that Responses have carried
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    top_log_probs: list[list[TokenLogProb]] = field(default_factory=list)
    prompt_log_probs: list[PromptLogProb] = field(default_factory=list)
    finish_reason: FinishReason = _NOT_FINISHED
    error: ResponseError | None = None
    perf_metrics: RequestPerfMetrics | None = None  # where the request wants them
    search: BeamSearch | None = None  # where the request wants beams
    beams: list[Beam] = field(default_factory=list)  # those that the last Response has carried
    rows: object = None  # what computes its beams, a type of the engine
    prompt: object = None  # what the engine made of a prompt with images, a type of the engine
    captured: Captured | None = None  # rows of logits and other tensors, where the request wants them
    is_pooled_whole: bool = False  # the request wants an embedding of all its tokens, not only of the last one
    embedding: Tensor | None = None

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
        return self.finish_reason is not _NOT_FINISHED or self.error is not None

    @property
    def siblings(self) -> list[Self]:
        """All sequences of the request, in the order of their indices; it is among them."""
        return cast("list[Self]", self.group.sequences)

    @property
    def lacks_prompt_log_probs(self) -> bool:
        wanted = self.index == 0 and self.request.output_config.num_prompt_log_probs is not None
        return wanted and len(self.prompt_log_probs) < self.num_prompt_tokens

    @property
    def lacks_context(self) -> bool:
        """Whether rows of the prompt are still to be captured."""
        return self.captured is not None and bool(self.captured.context) and self.num_generated == 0

    @property
    def lacks_prompt_rows(self) -> bool:
        """Whether the rows of all tokens of the prompt are needed, not only of its last one."""
        return self.lacks_prompt_log_probs or self.lacks_context or self.is_pooled_whole

    def replace_prompt(self, token_ids: list[int], max_sequence_length: int) -> None:
        """Take the tokens that the prompt has with its images. Raises PromptTooLong."""
        num_tokens = len(token_ids)
        if num_tokens >= max_sequence_length:
            rule = f"shorter than the model's context of {max_sequence_length} tokens"
            raise PromptTooLong(rule, f"{num_tokens} tokens, with those of its images")
        self.first_told = num_tokens if self.first_told else 0
        self.token_ids, self.num_prompt_tokens, self.num_prefill = list(token_ids), num_tokens, num_tokens
        self.max_tokens = min(self.max_tokens, max_sequence_length - num_tokens)

    def append(self, token_id: int, log_prob: float | None = None, top: list[TokenLogProb] | None = None) -> None:
        """Append a generated token. Sets `finish_reason` if it is the last."""
        self.token_ids.append(token_id)
        if self.perf_metrics is not None:
            self._note_time(self.perf_metrics)
        if log_prob is not None and self.request.output_config.return_log_probs:
            self.log_probs.append(log_prob)
            self.cum_log_prob += log_prob
        if top is not None:
            self.top_log_probs.append(top)
        self.finish_reason = self.reason_after(self.token_ids, self.num_generated)

    def advance(
        self, candidates: SequenceOf[SequenceOf[AnyCandidate]], tops: SequenceOf[list[TokenLogProb]] | None = None
    ) -> list[Continuation]:
        """Give all running beams their next token: see `BeamSearch.advance`. Sets `finish_reason` at the search's end.

        If no token is left to choose, the request fails.
        """
        assert self.search is not None
        steps = self.search.advance(candidates, tops)
        best = (self.search.running or self.search.best(1))[:1]
        if not best:
            self.fail_for_bans()
            return []
        self._follow(best[0])
        return steps

    def restate(self, beams: SequenceOf[Beam], *, is_over: bool) -> None:
        """Take the beams of an engine that searches by itself, the best first. Sets `finish_reason` at the end."""
        assert self.search is not None and beams
        self.search.restate(beams, is_over=is_over)
        self._follow(beams[0])

    def _follow(self, best: Beam) -> None:
        """Make the tokens of the best beam those of the sequence."""
        assert self.search is not None
        self.token_ids[self.num_prompt_tokens :] = best.token_ids
        if self.perf_metrics is not None:
            self._note_time(self.perf_metrics)
        if self.search.is_over:
            self.finish_reason = best.finish_reason

    @staticmethod
    def _note_time(metrics: RequestPerfMetrics) -> None:
        metrics.last_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = metrics.last_token_time

    def reason_after(self, token_ids: list[int], num_generated: int) -> FinishReason:
        """Why a sequence ends with these tokens, the last `num_generated` of which were generated.

        The precedence is END_ID, STOP_WORDS, LENGTH. Up to `min_tokens` only the length ends a sequence.
        """
        token_id = token_ids[-1]
        if num_generated > self.min_tokens:
            if token_id in self.end_ids and not self.request.ignore_eos:
                return FinishReason.END_ID
            words = self.stop_words.get(token_id)
            if words and any(len(word) <= num_generated and token_ids[-len(word) :] == word for word in words):
                return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if num_generated >= self.max_tokens else _NOT_FINISHED

    def finish(self, reason: FinishReason) -> None:
        """End a cancelled or timed-out sequence. Tokens that no Response has carried are dropped, as upstream does."""
        self.finish_reason = reason
        del self.token_ids[self.num_prompt_tokens + self.num_sent :]
        del self.log_probs[self.num_sent :]
        self.cum_log_prob = sum(self.log_probs)
        del self.top_log_probs[self.num_sent :]

    def embed(self, embedding: Tensor) -> None:
        """End a sequence whose request asks for the embedding of its prompt."""
        self.embedding, self.finish_reason = embedding, FinishReason.END_ID
        if self.perf_metrics is not None:
            self._note_time(self.perf_metrics)

    def fail(self, message: str, kind: ErrorKind = ErrorKind.GENERATION, field: str | None = None) -> None:
        """End every sequence of the request with an error."""
        for sequence in self.group.sequences:
            sequence.error = ResponseError(message, kind, field)

    def fail_for_bans(self) -> None:
        """End the request because no token may come next: its own fault if it has a rule that bans tokens."""
        request, sampling = self.request, self.request.sampling_config
        rules = {
            "guided_decoding_params": request.guided_decoding_params,
            "bad_words": request.bad_words,
            "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
            "min_tokens": sampling.min_tokens,
        }
        field = next((name for name, rule in rules.items() if rule), None)
        if field is None or request.logits_post_processor_name is not None:
            self.fail("no token can be chosen: every token is banned")
        else:
            self.fail("leaves no token to choose: every token is banned", ErrorKind.INVALID, field)

    def count_cached(self, num_tokens: int) -> None:
        self.num_cached_tokens = num_tokens
        if self.perf_metrics is not None:
            self.perf_metrics.num_reused_tokens = num_tokens

    def restart(self) -> None:
        """Start over after a preemption: all tokens known so far become the prompt to recompute.

        A search begins again at the prompt.
        """
        if self.search is not None:
            self.search.restart()
            del self.token_ids[self.num_prompt_tokens :]
        self.slot, self.num_computed, self.num_prefill = None, 0, self.num_tokens
        if self.num_generated == 0:
            self.count_cached(0)
        if self.lacks_prompt_log_probs:
            self.prompt_log_probs.clear()
        if self.captured is not None and self.lacks_context:
            self.captured.restart()

    def take_responses(self) -> list[Response]:
        """The new Responses. A request that is not streamed gets them at the end; a failed one gets one error."""
        request, is_finished = self.request, self.is_finished
        if self.error is not None:
            num_owed, self.group.num_owed = self.group.num_owed, 0
            return [Response(self.id, error=self.error, client_id=request.client_id)] if num_owed else []
        if not (is_finished or request.streaming):
            return []
        if self.search is not None and self.num_generated <= self.num_sent and not is_finished:
            return []  # after a restart the search repeats what was sent
        start, self.num_sent = self.num_sent, len(self.token_ids) - self.num_prompt_tokens
        responses = []
        for index in range(self.index, self.index + self.num_copies):
            self.group.num_owed -= is_finished
            result = self._result(start, index) if self.search is None else self._beam_result(start)
            if start == 0:
                result.num_cached_tokens = self.num_cached_tokens
                if request.images:
                    result.prompt_token_ids = self.token_ids[: self.num_prompt_tokens]
                wants_log_probs = request.output_config.num_prompt_log_probs is not None
                if result.sequence_index == 0 and wants_log_probs and not self.lacks_prompt_log_probs:
                    result.prompt_log_probs = self.prompt_log_probs
            if is_finished:
                result.request_perf_metrics = self.perf_metrics
            responses.append(Response(self.id, result, None, request.client_id))
        if self.captured is not None:
            self.captured.drop(self.num_sent)
        return responses

    def _result(self, num_sent: int, index: int) -> Result:
        """The Result with the tokens that no Response has carried yet, or with all tokens if the request wants them."""
        output, reason, is_final = self.request.output_config, self.finish_reason, self.group.num_owed == 0
        start = 0 if self.request.return_all_generated_tokens else num_sent
        token_ids = self.token_ids[self.first_told + start :]
        result = Result([token_ids], is_final, reason is not _NOT_FINISHED, index, [reason], embedding=self.embedding)
        if output.return_log_probs:
            result.log_probs, result.cum_log_probs = [self.log_probs[start:]], [self.cum_log_prob]
        if output.num_top_log_probs:
            result.top_log_probs = [self.top_log_probs[start:]]
        if self.captured is not None:
            self.captured.add_to(result, self.num_generated, is_first=index == num_sent == 0)
        return result

    def _beam_result(self, num_sent: int) -> Result:
        """The Result with all tokens of the best beams. A search that was cut off has those that were sent last."""
        assert self.search is not None
        output, is_over = self.request.output_config, self.search.is_over
        if is_over or not self.is_finished:
            self.beams = self.search.best(self.request.sampling_config.num_return_sequences)
        beams = self.beams or [Beam()]
        prompt = self.token_ids[self.first_told : self.num_prompt_tokens]
        reasons = [beam.finish_reason if is_over else self.finish_reason for beam in beams]
        token_ids, is_final = [prompt + beam.token_ids for beam in beams], self.group.num_owed == 0
        result = Result(token_ids, is_final, self.is_finished, self.index, reasons)
        if output.return_log_probs:
            result.log_probs = [beam.log_probs for beam in beams]
            result.cum_log_probs = [sum(beam.log_probs) for beam in beams]
        if output.num_top_log_probs:
            result.top_log_probs = [beam.top_log_probs for beam in beams]
        if self.captured is not None:
            self.captured.add_beams_to(result, [beam.token_ids for beam in beams], is_first=num_sent == 0)
        return result


def new_sequences(request_id: int, request: Request, max_sequence_length: int) -> list[Sequence]:
    return sequences_of(Sequence, request_id, request, max_sequence_length)


def sequences_of(
    kind: type[AnySequence], request_id: int, request: Request, max_sequence_length: int
) -> list[AnySequence]:
    """The sequences of a request that was just accepted. Its arrival time, deadline and seeds are set here.

    Sequence i uses seed + i. A greedy request has one sequence, which is answered `num_return_sequences` times. A
    request with beams has one sequence and one answer.
    """
    sampling, num_prompt_tokens = request.sampling_config, len(request.input_token_ids)
    num_answers = 1 if sampling.beam_width > 1 else sampling.num_return_sequences
    num_copies = num_answers if sampling.is_greedy else 1
    arrival_time = time.monotonic()
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    deadline = None if request.allotted_time_ms is None else arrival_time + request.allotted_time_ms / 1000
    has_metrics = request.output_config.return_perf_metrics
    excludes_prompt = request.output_config.exclude_input_from_output
    stop_words: dict[int, list[list[int]]] = {}
    for word in request.stop_words:
        stop_words.setdefault(word[-1], []).append(list(word))
    group, sequences = Group(num_owed=num_answers), []
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
            end_ids=frozenset(request.end_ids) | ({request.end_id} if request.end_id is not None else set()),
            stop_words=stop_words,
            perf_metrics=RequestPerfMetrics(arrival_time=arrival_time) if has_metrics else None,
            captured=new_captured(request.output_config, num_prompt_tokens, index),
        )
        if sampling.beam_width > 1:
            sequence.search = _new_search(sequence)
        sequences.append(sequence)
    group.sequences += sequences
    return sequences


def _new_search(sequence: Sequence) -> BeamSearch:
    end_ids = frozenset[int]() if sequence.request.ignore_eos else sequence.end_ids
    return BeamSearch(
        sequence.request.sampling_config,
        sequence.max_tokens,
        num_end_ids=len(end_ids | sequence.stop_words.keys()),
        reason_after=lambda token_ids: sequence.reason_after(token_ids, len(token_ids)),
    )
