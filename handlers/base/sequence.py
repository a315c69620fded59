"""A sequence of an engine with a model, which has more than tokens: cached keys and values, beams,
captured rows, images, or an embedding.

Plain Python, without scheduling rules.
"""

from collections.abc import Hashable, Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial

from handlers.base.beams import AnyCandidate, Beam, BeamSearch, Continuation
from handlers.base.captured import Captured
from handlers.base.token_sequence import TokenSequence, sequences_of
from lmi.errors import PromptTooLong
from lmi.executor import ErrorKind, FinishReason, Result, Tensor, TokenLogProb


@dataclass(slots=True, eq=False)
class Sequence(TokenSequence):
    """A sequence whose first `num_computed` tokens have keys and values in the cache.

    A request with beams is one sequence, whose output is that of the best running beam.
    """

    # Where the cache has them, while it runs.
    slot: int | None = None
    # Set where the request asks for beams.
    search: BeamSearch | None = None
    # The beams that the last Response has carried.
    beams: list[Beam] = field(default_factory=list)
    # What the engine keeps of the running beams: its own type.
    beam_state: object = None
    # What the engine made of a prompt with images: its own type.
    prompt: object = None
    # Rows of logits and other tensors, where the request asks for them.
    captured: Captured | None = None
    # Whether the request asks for an embedding of all its tokens, not only of the last one.
    is_pooled_whole: bool = False
    embedding: Tensor | None = None

    def __post_init__(self) -> None:
        sampling = self.request.sampling_config
        output = self.request.output_config
        if sampling.beam_width > 1:
            # Of stop words the last tokens.
            last_ids = set(self.stop_words)
            if not self.request.ignore_eos:
                last_ids |= self.end_ids

            self.search = BeamSearch(
                sampling,
                self.max_tokens,
                num_end_ids=len(last_ids),
                reason_after=lambda token_ids: self.reason_after(token_ids, len(token_ids)),
            )

        wants_logits = output.return_context_logits or output.return_generation_logits
        if output.additional_model_outputs or wants_logits:
            self.captured = Captured(output, self.num_prompt_tokens, has_context=self.index == 0)

    @property
    def lacks_context(self) -> bool:
        """Whether rows of the prompt are still to be captured."""
        if self.captured is None or not self.captured.context:
            return False

        return self.num_generated == 0

    @property
    def lacks_prompt_rows(self) -> bool:
        """Whether the rows of all tokens of the prompt are needed, not only of its last one."""
        return self.lacks_prompt_log_probs or self.lacks_context or self.is_pooled_whole

    def replace_prompt(self, token_ids: list[int], max_sequence_length: int) -> None:
        """Take the tokens that the prompt has with its images. Raises PromptTooLong."""
        num_tokens = len(token_ids)
        if num_tokens >= max_sequence_length:
            counted = f"{num_tokens} tokens, with those of its images"
            raise PromptTooLong.of_context(max_sequence_length, counted)

        # An answer begins behind the prompt, or with it.
        if self.first_told:
            self.first_told = num_tokens

        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_tokens
        self.num_prefill = num_tokens
        self.max_tokens = min(self.max_tokens, max_sequence_length - num_tokens)

    def advance(
        self,
        candidates: SequenceOf[SequenceOf[AnyCandidate]],
        tops: SequenceOf[list[TokenLogProb]] | None = None,
    ) -> list[Continuation]:
        """Give all running beams their next token: see `BeamSearch.advance`.

        Sets `finish_reason` at the end of the search. If no token is left to choose, the request
        fails.
        """
        assert self.search is not None
        steps = self.search.advance(candidates, tops)
        beams = self.search.running or self.search.best(1)
        if not beams:
            self.fail_for_bans()
            return []

        self._follow(beams[0])
        return steps

    def restate(self, beams: SequenceOf[Beam], *, is_over: bool) -> None:
        """Take the beams of an engine that searches by itself, the best first.

        Sets `finish_reason` if the search is over.
        """
        assert self.search is not None and beams
        self.search.restate(beams, is_over=is_over)
        self._follow(beams[0])

    def _follow(self, best: Beam) -> None:
        """Make the tokens of the best beam those of the sequence."""
        assert self.search is not None
        self.token_ids[self.num_prompt_tokens :] = best.token_ids
        self._note_time()
        if self.search.is_over:
            self.finish_reason = best.finish_reason

    def embed(self, embedding: Tensor) -> None:
        """End a sequence whose request asks for the embedding of its prompt."""
        self.embedding = embedding
        self.finish_reason = FinishReason.END_ID
        self._note_time()

    def fail_for_bans(self) -> None:
        """End the request because no token may come next.

        It is a fault of the request if it has a rule that bans tokens, and no function of the
        user's changed its logits.
        """
        request = self.request
        sampling = request.sampling_config
        rules = {
            "guided_decoding_params": request.guided_decoding_params,
            "bad_words": request.bad_words,
            "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
            "min_tokens": sampling.min_tokens,
        }

        names = [name for name, rule in rules.items() if rule]
        if not names or request.logits_post_processor_name is not None:
            self.fail("no token can be chosen: every token is banned")
        else:
            why = "leaves no token to choose: every token is banned"
            self.fail(why, ErrorKind.INVALID, names[0])

    def count_cached(self, num_tokens: int) -> None:
        """Note how many tokens of the prompt were cached."""
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

        self.slot = None
        self.num_computed = 0
        self.num_prefill = self.num_tokens
        if self.num_generated == 0:
            self.count_cached(0)

        if self.lacks_prompt_log_probs:
            self.prompt_log_probs.clear()

        if self.captured is not None and self.lacks_context:
            self.captured.restart()

    def _result(self, num_sent: int, index: int) -> Result:
        """Return the Result of copy `index`, behind `num_sent` tokens that Responses have
        carried.
        """
        if self.search is None:
            result = TokenSequence._result(self, num_sent, index)
        else:
            result = self._beam_result(self.search)

        if num_sent == 0:
            result.num_cached_tokens = self.num_cached_tokens
            result.embedding = self.embedding
            if self.request.images:
                result.prompt_token_ids = self.token_ids[: self.num_prompt_tokens]

        if self.captured is not None:
            self._add_captured(self.captured, result, num_sent, index)

        return result

    def _add_captured(self, captured: Captured, result: Result, num_sent: int, index: int) -> None:
        """Add captured rows to the Result of copy `index`, and drop them after the last copy.

        The rows of beams stay, since every Result has all of them.
        """
        is_first = index == 0 and num_sent == 0
        is_last_copy = index == self.index + self.num_copies - 1
        may_drop = self.num_sent > 0 and is_last_copy

        if self.beams:
            places_of_beams = [_places_of(beam) for beam in self.beams]
            captured.add_to(result, places_of_beams, is_first=is_first)
            if may_drop:
                captured.drop(())
        else:
            places = range(num_sent, self.num_generated)
            captured.add_to(result, [places], is_first=is_first)
            if may_drop:
                captured.drop(places)

    def _beam_result(self, search: BeamSearch) -> Result:
        """Return the Result with all tokens of the best beams.

        A sequence that ended before its search has the beams that were sent last.
        """
        output = self.request.output_config
        is_over = search.is_over
        if is_over or not self.is_finished:
            self.beams = search.best(self.request.sampling_config.num_return_sequences)

        if not self.beams:
            self.beams = [Beam()]

        beams = self.beams
        prompt = self.token_ids[self.first_told : self.num_prompt_tokens]
        reasons = [beam.finish_reason if is_over else self.finish_reason for beam in beams]
        token_ids = [prompt + beam.token_ids for beam in beams]
        is_final = self.group.num_owed == 0
        result = Result(token_ids, is_final, self.is_finished, self.index, reasons)

        if output.return_log_probs:
            result.log_probs = [beam.log_probs for beam in beams]
            result.cum_log_probs = [sum(beam.log_probs) for beam in beams]

        if output.num_top_log_probs:
            result.top_log_probs = [beam.top_log_probs for beam in beams]

        return result


def _places_of(beam: Beam) -> list[Hashable]:
    """Return the place of each token of a beam, which is the tokens before it."""
    return [tuple(beam.token_ids[:end]) for end in range(len(beam.token_ids))]


new_sequences = partial(sequences_of, Sequence)
"""Makes the sequences of a request: see `sequences_of`."""
