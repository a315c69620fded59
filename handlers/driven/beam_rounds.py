"""The rounds of a beam search on an engine that knows none: in each, every running beam is a
request of one token.

The engine reports log-probs from before its rules, so beside beams there is none but `min_tokens`,
which is kept here.
"""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from handlers.base.beams import Candidate, num_candidates
from handlers.base.sequence import Sequence
from handlers.driven.outputs import LogProbs, SequenceOutput, best_tokens, note_prompt
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import EngineInfo, Request


class _Refused(NamedTuple):
    """A parameter that a request cannot have beside beams, and whether it has it."""

    name: str
    noun: str
    is_set: bool


def check_beams(request: Request, info: EngineInfo) -> None:
    """Raise Unsupported for a rule that a request cannot have beside beams, InvalidParameter for
    too many ends.
    """
    if request.sampling_config.beam_width == 1:
        return

    config = request.sampling_config
    refused = (
        _Refused("embedding_bias", "biases", bool(request.embedding_bias)),
        _Refused("images", "images", bool(request.images)),
        _Refused("bad_words", "bad words", bool(request.bad_words)),
        _Refused("repetition_penalty", "penalties", config.repetition_penalty not in (None, 1)),
        _Refused("presence_penalty", "penalties", bool(config.presence_penalty)),
        _Refused("frequency_penalty", "penalties", bool(config.frequency_penalty)),
    )
    for parameter in refused:
        if parameter.is_set:
            raise Unsupported(
                parameter.name, f"{info.name} has no {parameter.noun} in a beam search"
            )

    num_ends = len(_ends(request))
    num_over = num_candidates(config.beam_width, num_ends) - info.capabilities.max_top_log_probs
    if num_over > 0:
        rule = f"at most {num_ends - num_over} together with stop_words beside beams of this width"
        raise InvalidParameter("end_ids", rule, num_ends)


def _ends(request: Request) -> set[int]:
    """Return the tokens that may end a beam."""
    ends = set(request.end_ids)
    ends.update(word[-1] for word in request.stop_words)
    if request.end_id is not None:
        ends.add(request.end_id)

    return ends


@dataclass(frozen=True, slots=True)
class BeamRow:
    """A running beam as the engine gets it: a request of one token."""

    # The engine knows it by this name.
    name: str
    # The prompt and the tokens of the beam.
    token_ids: list[int]
    # How many of the best log-probs it asks for.
    num_top: int
    # The time.time() of the request: a row does not wait behind what came after the request.
    arrival_time: float


class BeamRounds:
    """The rounds of one sequence's search."""

    def __init__(self, sequence: Sequence, name: str) -> None:
        """The names of its rows begin with `name`."""
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

        rows: list[BeamRow] = []
        for number, beam in enumerate(self._sequence.search.running):
            name = f"{self._name}.{self._num_rounds}.{number}"
            token_ids = [*prompt, *beam.token_ids]
            rows.append(BeamRow(name, token_ids, num_top, self._arrival_time))

        self._outputs = {row.name: None for row in rows}
        return rows

    def take(self, output: SequenceOutput) -> bool:
        """Note the output of a row. The last one of a round continues the search.

        Returns whether this was the last one.
        """
        self._outputs[output.id] = output
        outputs = [row_output for row_output in self._outputs.values() if row_output is not None]
        if len(outputs) < len(self._outputs):
            return False

        note_prompt(self._sequence, outputs[0])
        self._sequence.num_computed = self._sequence.num_tokens
        self._advance(outputs)
        return True

    def _advance(self, outputs: list[SequenceOutput]) -> None:
        """Continue the search by the outputs of all rows, in the order of the beams."""
        # Every row asks for log-probs, so there are as many as beams.
        all_log_probs = [
            row_output.log_probs for row_output in outputs if row_output.log_probs is not None
        ]
        candidates = [self._candidates(log_probs) for log_probs in all_log_probs]
        tops = None
        if self._num_top:
            tops = [best_tokens(log_probs, 0, self._num_top) for log_probs in all_log_probs]

        self._sequence.advance(candidates, tops)

    def _candidates(self, log_probs: LogProbs) -> list[Candidate]:
        """Return the tokens that may continue a beam, by its log-probs."""
        is_early = self._sequence.num_generated < self._sequence.min_tokens
        banned_ids = self._early_banned_ids if is_early else frozenset[int]()

        candidates: list[Candidate] = []
        for token in best_tokens(log_probs, 0, self._num_candidates):
            score = -math.inf if token.token_id in banned_ids else token.log_prob
            candidates.append(Candidate(token.token_id, score, token.log_prob))

        return candidates
