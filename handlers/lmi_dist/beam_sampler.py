"""The candidates of beam searches, from the logits of their rows.

A log_softmax of the model's logits is what a Result reports. Functions of the user and rules then change these
log-probs, as in transformers' beam search, and the search adds up what is left. The bits of a row's candidates depend
only on that row.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from handlers.base.beams import AnyCandidate
from handlers.lmi_dist.sampler import Sampler
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.wishes import CHOSEN, Floats
from lmi.executor import TokenLogProb


class Outlook(NamedTuple):
    """What may come next in one row: candidates, and the alternatives that a Result lists."""

    candidates: list[AnyCandidate]
    top: list[TokenLogProb]
    is_usable: bool  # whether the row's logits are numbers, after functions of the user too


class BeamSampler:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> dict[EmbeddedSequence, list[Outlook]]:
        """What each search can continue with, in the order of its beams.

        `logits` is (num_logits, vocab), float32. `rows` has the row of each of the `sequences`, which are rows of
        searches, or searches that begin.
        """
        row_of = dict(zip(sequences, rows, strict=True))
        searches = list(dict.fromkeys(beam.owner for beam in sequences))
        beams = [beam for search in searches for beam in search.beam_rows]
        outlooks = iter(self._outlooks(logits, [row_of[beam] for beam in beams], beams))
        return {search: list(islice(outlooks, len(search.beam_rows))) for search in searches}

    def _outlooks(self, logits: Floats, rows: list[int], beams: list[EmbeddedSequence]) -> list[Outlook]:
        for beam in beams:
            if beam.search is not None:  # it begins
                self._sampler.new_state(beam, beam.search.num_candidates)
        states = [beam.sampler_state or self._sampler.new_state(beam) for beam in beams]
        choices, best = self._sampler.fulfil(logits, rows, beams, states)
        left, outlooks = iter(best.tolist()), []
        for beam, state, status in zip(beams, states, choices["status"].tolist(), strict=True):
            top = [TokenLogProb(token_id, log_prob) for token_id, _, log_prob in islice(left, state.num_top)]
            search = beam.owner.search
            assert search is not None
            num_candidates = min(search.num_candidates, self._sampler.vocab_size)
            outlooks.append(Outlook(list(islice(left, num_candidates)), top, status == CHOSEN))
        return outlooks


def advance_beams(outlooks: dict[EmbeddedSequence, list[Outlook]]) -> list[EmbeddedSequence]:
    """Continue the searches. Returns them."""
    for sequence, own in outlooks.items():
        _advance(sequence, own)
    return list(outlooks)


def _advance(sequence: EmbeddedSequence, outlooks: list[Outlook]) -> None:
    """Continue a search, and say what its rows are in the next step."""
    if sequence.error is not None:
        return  # a function of the user has failed
    if not all(outlook.is_usable for outlook in outlooks):
        sequence.fail("no token can be chosen: the model's logits are not numbers")
        return
    tops = [outlook.top for outlook in outlooks] if sequence.request.output_config.num_top_log_probs else None
    steps = sequence.advance([outlook.candidates for outlook in outlooks], tops)
    assert sequence.rows is not None
    sequence.rows.advance(steps)
