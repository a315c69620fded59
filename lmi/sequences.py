"""The sequences of a request: what the engine says of them becomes Deltas, with text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import getsizeof
from typing import NamedTuple

import msgspec

from lmi import errors
from lmi.engine.submission import Submission
from lmi.executor import FinishReason, Result
from lmi.text.answer import AnswerText, prompt_tokens
from lmi.text.tokenizer import Tokenizer
from lmi.types import AnswerEnd, Delta, GenerationRequest

# Of a request whose frame has more bytes, or whose prompt has more characters, only what its answer
# needs is kept until the answer ends.
LONG_BYTES = 4096
ID_BYTES = 4
REASONS = {
    FinishReason.END_ID: AnswerEnd.EOS_TOKEN,
    FinishReason.STOP_WORDS: AnswerEnd.STOP_SEQUENCE,
    FinishReason.LENGTH: AnswerEnd.LENGTH,
}


class KeptRequest(NamedTuple):
    """What is kept of a request from its submission to the end of its answer."""

    request: GenerationRequest
    # The text that the answer continues, if a formatter may read it.
    prompt: str
    prompt_ids: Sequence[int]
    # What this holds of a long request, beside the frame of its submission. 0 for any other one.
    num_bytes: int

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        prompt: str,
        prompt_ids: Sequence[int],
        submission: Submission,
    ) -> KeptRequest:
        """Return the whole request, or of a long one no more than its answer needs."""
        # A long prompt of which few tokens are kept has a short frame.
        if max(len(submission.frame), request.num_prompt_chars) <= LONG_BYTES:
            return cls(request, prompt, prompt_ids, 0)

        if not request.return_full_text and request.chat is None:
            # No formatter reads it.
            prompt = ""

        ids = array("I", prompt_ids)
        num_bytes = getsizeof(prompt) + ID_BYTES * len(ids)
        return cls(request.for_answer(), prompt, ids, num_bytes)


class Sequences:
    """The sequences of one request, which turn each Result into a Delta.

    `open_texts` has the texts of those that have not ended, by index. `num_bytes` is what they hold
    of their request until its end (see KeptRequest).
    """

    def __init__(
        self, tokenizer: Tokenizer, kept: KeptRequest, submission: Submission, first_index: int
    ) -> None:
        """In the whole answer these sequences have the indexes from `first_index` on."""
        request = kept.request
        self.request = request
        self.submission = submission
        self._tokenizer = tokenizer
        self.num_bytes = kept.num_bytes
        self._prompt = kept.prompt
        self._first_index = first_index
        self._prompt_ids = kept.prompt_ids
        self._is_prompt_told = False

        self.open_texts: dict[int, AnswerText] = {}
        for index in range(request.num_sequences):
            self.open_texts[index] = AnswerText(tokenizer, request, self._prompt_ids)

    def read(self, result: Result) -> Delta | None:
        """Return the Delta of a Result. Raises DeadlineExceeded if the engine's time for the
        request is over.

        A stop string ends a sequence although the engine goes on with it. The Results that come
        after it have no Delta.
        """
        index = result.sequence_index
        ids = result.output_token_ids[0]
        reason = result.finish_reasons[0]
        if result.prompt_token_ids is not None:
            self._prompt_ids = result.prompt_token_ids

        answer = self.open_texts.get(index)
        if answer is None:
            return None

        if reason is FinishReason.TIMED_OUT:
            raise errors.DeadlineExceeded("the engine's time for this request ran out")

        log_probs = result.log_probs[0] if result.log_probs else None
        top = result.top_log_probs[0] if result.top_log_probs else None
        delta = Delta(answer.feed(ids, log_probs, top, reason), index=self._first_index + index)
        delta.prompt = self._prompt
        delta.prompt_token_ids = self._prompt_ids
        if index == 0 and not self._is_prompt_told:
            self._is_prompt_told = True
            self._tell_prompt(delta, result)

        _set_finish(delta, result, answer.stop_string)
        if delta.finish_reason is not None:
            del self.open_texts[index]

        return delta

    def _tell_prompt(self, delta: Delta, result: Result) -> None:
        """Set in the first Delta of a request what it says of the prompt."""
        delta.num_prompt_tokens = len(self._prompt_ids)
        delta.num_cached_tokens = result.num_cached_tokens
        if self.request.prefill_details:
            delta.prefill = prompt_tokens(
                self._tokenizer, self._prompt_ids, result.prompt_log_probs
            )

    def read_beams(self, result: Result) -> list[Delta]:
        """Return a Delta for each beam of a search that has ended. Raises GenerationFailed if beams
        are missing.
        """
        deltas = []
        for beam in beams_of(result):
            delta = self.read(beam)
            if delta is not None:
                deltas.append(delta)

        if result.is_final and self.open_texts:
            num_beams = len(deltas) + len(self.open_texts)
            raise errors.GenerationFailed(
                f"the engine found only {len(deltas)} of {num_beams} beams"
            )

        return deltas


def _set_finish(delta: Delta, result: Result, stop_string: str | None) -> None:
    """Set in the last Delta of a sequence why it ended: a stop string was found, or the engine has
    finished it.
    """
    ids = result.output_token_ids[0]
    reason = result.finish_reasons[0]
    if stop_string is not None:
        delta.finish_reason = AnswerEnd.STOP_SEQUENCE
        delta.stop_reason = stop_string
    elif reason is not FinishReason.NOT_FINISHED:
        delta.finish_reason = REASONS[reason]
        delta.times = result.request_perf_metrics
        delta.embedding = result.embedding
        if ids and reason is FinishReason.STOP_WORDS:
            delta.stop_reason = ids[-1]


def beams_of(result: Result) -> list[Result]:
    """Return a Result for each beam of a search that has ended, as if each were a sequence. Beams
    may change until then, so there is none before.
    """
    if not result.is_final:
        return []

    beams = []
    for index, ids in enumerate(result.output_token_ids):
        beam = msgspec.structs.replace(
            result,
            output_token_ids=[ids],
            sequence_index=index,
            finish_reasons=[result.finish_reasons[index]],
            log_probs=result.log_probs and [result.log_probs[index]],
            top_log_probs=result.top_log_probs and [result.top_log_probs[index]],
        )
        beams.append(beam)

    return beams
