"""Beam search: which candidates for the next tokens run on, and which finished beams are kept.

Sequences and scores are those of transformers' beam search. It knows no model: an engine gives it
the log-probs of the candidates for each running beam. Temperature and what else makes sampling
random have no effect. Plain Python.
"""

import math
from collections.abc import Callable, Sequence as SequenceOf
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from lmi.executor import FinishReason, SamplingConfig, TokenLogProb


class Candidate(NamedTuple):
    """A token that may come next."""

    token_id: int
    # Its log-prob after all rules of the request, which the search adds up.
    score: float
    # Its log-prob before any rule, which a Result reports.
    log_prob: float


# A Candidate, or a bare tuple of the same, which is quicker to make.
AnyCandidate: TypeAlias = tuple[int, float, float]


class Continuation(NamedTuple):
    """A beam that runs next: a running beam, by its index, and the token that continues it."""

    parent: int
    token_id: int


class Beam(Struct, frozen=True):
    """A possible answer. The lists have one entry for each generated token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    # The alternatives, where the request wants some.
    top_log_probs: list[list[TokenLogProb]] = field(default_factory=list)
    # The sum of the scores of its tokens.
    sum: float = 0.0
    finish_reason: FinishReason = FinishReason.NOT_FINISHED

    def score(self, length_penalty: float) -> float:
        """Return the sum of its scores over its length to the power of `length_penalty`."""
        return _score(self.sum, len(self.token_ids), length_penalty)


class _Extension(NamedTuple):
    """A candidate for a running beam, and the sum of the scores with it."""

    sum: float
    # The index of the running beam.
    parent: int
    candidate: AnyCandidate


class BeamSearch:
    """The state of one request's search.

    The search ends when no beam runs, or when `beam_width` beams are finished and it is settled:

    - `early_stopping` is 1,
    - or it is 0, and no running beam would be better than the worst of them if it ended now,
    - or it is over 1, and no running beam can become better at any length.
    """

    def __init__(
        self,
        config: SamplingConfig,
        max_tokens: int,
        num_end_ids: int,
        reason_after: Callable[[list[int]], FinishReason],
    ) -> None:
        """`num_end_ids`: how many tokens may end a beam.

        `reason_after` says why a beam ends with these generated tokens, or that it goes on.
        """
        self.beam_width = config.beam_width
        self.length_penalty = 1.0 if config.length_penalty is None else config.length_penalty
        self.early_stopping = config.early_stopping or 0
        self.max_tokens = max_tokens
        self.num_candidates = num_candidates(self.beam_width, num_end_ids)
        self._reason_after = reason_after
        # Both are sorted, the best beam first.
        self.running = [Beam()]
        self.finished: list[Beam] = []

    def restart(self) -> None:
        """Forget everything but the prompt."""
        self.running = [Beam()]
        self.finished = []

    @property
    def is_over(self) -> bool:
        """Whether no beam runs any more."""
        return not self.running

    def advance(
        self,
        candidates: SequenceOf[SequenceOf[AnyCandidate]],
        tops: SequenceOf[list[TokenLogProb]] | None = None,
    ) -> list[Continuation]:
        """Continue the search, and return what each beam of the new `running` continues. The list
        is empty at the end.

        `candidates` has for each running beam its best tokens, `num_candidates` or all that are
        allowed, in any order. `tops` are the alternatives at the new position of each beam, which
        the search only keeps.
        """
        steps: list[Continuation] = []
        running: list[Beam] = []
        for rank, extension in enumerate(self._extensions(candidates)):
            if rank >= self.beam_width and len(running) == self.beam_width:
                break

            parent = extension.parent
            top = tops[parent] if tops else None
            beam = self._continued(self.running[parent], extension.candidate, top)
            if beam.finish_reason is FinishReason.NOT_FINISHED:
                steps.append(Continuation(parent, beam.token_ids[-1]))
                running.append(beam)
            # A finished beam that is worse is only passed over, so that enough beams run on.
            elif rank < self.beam_width:
                finished = sorted([*self.finished, beam], key=self._score, reverse=True)
                self.finished = finished[: self.beam_width]

        self.running = running
        if running and self._is_settled():
            self.running = []
            steps = []

        return steps

    def _extensions(self, candidates: SequenceOf[SequenceOf[AnyCandidate]]) -> list[_Extension]:
        """Return the candidates of all running beams, the best first; none that a rule has
        banned.
        """
        extensions: list[_Extension] = []
        beams = zip(self.running, candidates, strict=True)
        for parent, (beam, candidates_of_beam) in enumerate(beams):
            for candidate in candidates_of_beam:
                score = candidate[1]
                if math.isfinite(score):
                    extensions.append(_Extension(beam.sum + score, parent, candidate))

        extensions.sort(key=attrgetter("sum"), reverse=True)
        return extensions

    def restate(self, beams: SequenceOf[Beam], *, is_over: bool) -> None:
        """Take the beams of an engine that searches by itself, in place of those before."""
        self.running = []
        self.finished = []
        if is_over:
            self.finished += beams
        else:
            self.running += beams

    def best(self, num_beams: int) -> list[Beam]:
        """Return at most `num_beams` beams, the best by score: finished ones, and running ones
        while there are any.
        """
        beams = sorted(self.finished + self.running, key=self._score, reverse=True)
        return beams[:num_beams]

    def _continued(
        self, beam: Beam, candidate: AnyCandidate, top: list[TokenLogProb] | None
    ) -> Beam:
        token_id, score, log_prob = candidate
        token_ids = [*beam.token_ids, token_id]
        top_log_probs = beam.top_log_probs
        if top is not None:
            top_log_probs = [*top_log_probs, top]

        return Beam(
            token_ids=token_ids,
            log_probs=[*beam.log_probs, log_prob],
            top_log_probs=top_log_probs,
            sum=beam.sum + score,
            finish_reason=self._reason_after(token_ids),
        )

    def _is_settled(self) -> bool:
        """Whether the finished beams are enough and no running beam can become better than the
        worst of them.
        """
        if len(self.finished) < self.beam_width:
            return False

        if self.early_stopping == 1:
            return True

        best = self.running[0]
        is_any_length = self.early_stopping > 1 and self.length_penalty > 0
        length = self.max_tokens if is_any_length else len(best.token_ids)
        return _score(best.sum, length, self.length_penalty) <= self._score(self.finished[-1])

    def _score(self, beam: Beam) -> float:
        return beam.score(self.length_penalty)


def num_candidates(beam_width: int, num_end_ids: int) -> int:
    """Return how many of a beam's best tokens the search needs: some of them may be ends."""
    return beam_width + max(beam_width, num_end_ids)


def _score(sum: float, length: int, length_penalty: float) -> float:
    # A quotient would overflow where a product becomes 0.
    return sum * math.pow(max(length, 1), -length_penalty)
