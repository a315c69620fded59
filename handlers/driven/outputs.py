"""What a foreign engine outputs for a sequence after a step, and the code that adds it to a
Sequence.

A beam search that the engine does not know is made of rounds: each running beam is a request of one
token. The engine reports log-probs from before its rules, so beside beams there is none but
`min_tokens`, which is kept here.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

from handlers.base.beams import Beam, Candidate, num_candidates
from handlers.base.sequence import Sequence
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import EngineInfo, FinishReason, PromptLogProb, Request, Tensor, TokenLogProb


@dataclass(slots=True)
class LogProbs:
    """Log-probs at some positions, one list for each position.

    A list starts with the token at its position. The best tokens follow in order, though it may be
    one of them. A list may be longer than the request asked for.
    """

    token_ids: list[list[int]]
    values: list[list[float]]


@dataclass(slots=True)
class SequenceOutput:
    """The new tokens of one sequence. `log_probs` is parallel to `token_ids`.

    `prompt_log_probs` begins at the prompt's second token. `end` is None while the sequence goes
    on, and an exception if the engine gave it up. An engine that searches beams by itself reports
    all of them anew, the best first, in place of new tokens.
    """

    id: str
    token_ids: list[int]
    log_probs: LogProbs | None = None
    prompt_log_probs: LogProbs | None = None
    end: FinishReason | Exception | None = None
    # Tokens of the prompt that were cached. The number counts with the first token.
    num_cached_tokens: int = 0
    beams: list[Beam] | None = None
    # The embedding of the prompt, if the request asks for it.
    embedding: Tensor | None = None
    # Rows of tensors that the request asks for, a type of the engine.
    rows: Any = None


def ending_tokens(sequence: Sequence) -> list[int]:
    """Every single token that ends a sequence, for an engine that is to stop there."""
    words = [word[0] for word in sequence.request.stop_words if len(word) == 1]
    ends = [] if sequence.request.ignore_eos else sorted(sequence.end_ids)
    return [int(token_id) for token_id in dict.fromkeys([*ends, *words])]


def feed(sequence: Sequence, output: SequenceOutput) -> None:
    """Append the new tokens, or take the beams. End the sequence at its last token and drop the
    tokens after it.
    """
    _note_prompt(sequence, output)
    sequence.num_computed = sequence.num_tokens
    if output.beams is not None:
        sequence.restate(output.beams, is_over=isinstance(output.end, FinishReason))

    log_probs = output.log_probs
    num_top = sequence.request.output_config.num_top_log_probs
    for position, token_id in enumerate(output.token_ids):
        if sequence.is_finished:
            return

        if log_probs is None:
            sequence.append(token_id)
        else:
            top = best(log_probs, position, num_top) if num_top else None
            sequence.append(token_id, log_probs.values[position][0], top)

    if output.embedding is not None:
        sequence.embed(output.embedding)

    if isinstance(output.end, FinishReason) and not sequence.is_finished:
        sequence.finish_reason = output.end


def best(log_probs: LogProbs, position: int, num_top: int) -> list[TokenLogProb]:
    token_ids = log_probs.token_ids[position][1 : num_top + 1]
    values = log_probs.values[position][1 : num_top + 1]
    return [
        TokenLogProb(token_id, value) for token_id, value in zip(token_ids, values, strict=True)
    ]


def _note_prompt(sequence: Sequence, output: SequenceOutput) -> None:
    """Note what an output says of the prompt, before its tokens are appended."""
    if not sequence.num_generated:
        sequence.count_cached(output.num_cached_tokens)

    new = output.prompt_log_probs
    if new is not None and sequence.lacks_prompt_log_probs:
        num_top = sequence.request.output_config.num_prompt_log_probs or 0
        # The first token of a prompt has no log-prob.
        prompt_log_probs = sequence.prompt_log_probs.copy() or [PromptLogProb(None)]
        for position, values in enumerate(new.values):
            prompt_log_probs.append(PromptLogProb(values[0], best(new, position, num_top)))

        sequence.prompt_log_probs = prompt_log_probs


def check_beams(request: Request, info: EngineInfo) -> None:
    """Raise Unsupported for a rule that a request cannot have beside beams, InvalidParameter for
    too many ends.
    """
    if request.sampling_config.beam_width == 1:
        return

    config = request.sampling_config
    for name, noun, is_given in (
        ("embedding_bias", "biases", bool(request.embedding_bias)),
        ("images", "images", bool(request.images)),
        ("bad_words", "bad words", bool(request.bad_words)),
        ("repetition_penalty", "penalties", config.repetition_penalty not in (None, 1)),
        ("presence_penalty", "penalties", bool(config.presence_penalty)),
        ("frequency_penalty", "penalties", bool(config.frequency_penalty)),
    ):
        if is_given:
            raise Unsupported(name, f"{info.name} has no {noun} in a beam search")

    num_ends = len(_ends(request))
    num_over = num_candidates(config.beam_width, num_ends) - info.capabilities.max_top_log_probs
    if num_over > 0:
        rule = f"at most {num_ends - num_over} together with stop_words beside beams of this width"
        raise InvalidParameter("end_ids", rule, num_ends)


def _ends(request: Request) -> set[int]:
    """The tokens that may end a beam."""
    ends = set(request.end_ids)
    ends.update(word[-1] for word in request.stop_words)
    if request.end_id is not None:
        ends.add(request.end_id)

    return ends


@dataclass(frozen=True, slots=True)
class BeamRow:
    """A running beam as the engine gets it. It asks for one token after `token_ids`, and for
    `num_top` log-probs.
    """

    name: str
    token_ids: list[int]
    num_top: int
    # The time.time() of the request: a row does not wait behind what came after the request.
    arrival_time: float


class BeamRounds:
    """The rounds of one sequence's search. The engine knows the sequence by `name`."""

    def __init__(self, sequence: Sequence, name: str) -> None:
        self._sequence = sequence
        self._name = name
        self._arrival_time = time.time()

        request = sequence.request
        beam_width = request.sampling_config.beam_width
        self._num_top = request.output_config.num_top_log_probs
        self._num_candidates = num_candidates(beam_width, len(_ends(request)))

        stops = {word[0] for word in request.stop_words if len(word) == 1}
        # Banned until there are `min_tokens` tokens.
        self._early_banned_ids = sequence.end_ids | stops

        self._num_rounds = 0
        # The outputs of the round's rows by name, in the order of the beams.
        self._outputs: dict[str, SequenceOutput | None] = {}

    @property
    def names(self) -> list[str]:
        """The names of the round's rows. No other round has them."""
        return list(self._outputs)

    def begin(self) -> list[BeamRow]:
        """Begin a round, again if it was given up. Returns its rows."""
        assert self._sequence.search is not None
        self._num_rounds += 1
        prompt = self._sequence.request.input_token_ids
        num_top = max(self._num_candidates, self._num_top)

        rows = []
        for number, beam in enumerate(self._sequence.search.running):
            name = f"{self._name}.{self._num_rounds}.{number}"
            token_ids = [*prompt, *beam.token_ids]
            rows.append(BeamRow(name, token_ids, num_top, self._arrival_time))

        self._outputs = {row.name: None for row in rows}
        return rows

    def take(self, output: SequenceOutput) -> bool:
        """Note the output of a row. The round's last one continues the search; returns whether this
        was the last.
        """
        self._outputs[output.id] = output
        outputs = [row_output for row_output in self._outputs.values() if row_output is not None]
        if len(outputs) < len(self._outputs):
            return False

        _note_prompt(self._sequence, outputs[0])
        self._sequence.num_computed = self._sequence.num_tokens

        all_log_probs = [
            row_output.log_probs for row_output in outputs if row_output.log_probs is not None
        ]
        candidates = [self._candidates(log_probs) for log_probs in all_log_probs]
        tops = None
        if self._num_top:
            tops = [best(log_probs, 0, self._num_top) for log_probs in all_log_probs]

        self._sequence.advance(candidates, tops)
        return True

    def _candidates(self, log_probs: LogProbs) -> list[Candidate]:
        is_early = self._sequence.num_generated < self._sequence.min_tokens
        banned_ids = self._early_banned_ids if is_early else frozenset[int]()

        candidates = []
        for token in best(log_probs, 0, self._num_candidates):
            score = -math.inf if token.token_id in banned_ids else token.log_prob
            candidates.append(Candidate(token.token_id, score, token.log_prob))

        return candidates
