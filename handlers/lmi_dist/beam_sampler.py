"""The candidates of beam searches, from the logits of their rows.

A log_softmax of the model's logits is what a Result reports. Functions of the user and rules then change these
log-probs, as in transformers' beam search, and the search adds up what is left. The bits of a row's candidates depend
only on that row.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple, cast

from torch import Tensor

from handlers.base.beams import AnyCandidate, BeamSearch
from handlers.base.sequence import Sequence
from handlers.lmi_dist.beam_rows import beam_rows, owner_of, rows_of
from handlers.lmi_dist.log_probs import top_log_probs
from handlers.lmi_dist.logits_rows import take_rows
from handlers.lmi_dist.logits_rules import LogitsRules, RuledRow, apply_rules, new_rules
from handlers.lmi_dist.post_processors import PostProcessors
from lmi.executor import TokenLogProb


class Outlook(NamedTuple):
    """What may come next in one row: candidates, and the alternatives that a Result lists."""

    candidates: list[AnyCandidate]
    top: list[TokenLogProb] | None

    def is_usable(self) -> bool:
        """Whether the row's logits are numbers, after functions of the user too."""
        return self.candidates[0][1] < math.inf  # a NaN or an infinite one would be the first


class BeamSampler:
    def __init__(self, vocab_size: int, post_processors: PostProcessors | None = None) -> None:
        self._vocab_size = vocab_size
        self._post_processors = post_processors

    def sample(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> dict[Sequence, list[Outlook]]:
        """What each search can continue with, in the order of its beams.

        `logits` is (num_logits, vocab), float32. `rows` has the row of each of the `sequences`, which are rows of
        searches, or searches that begin.
        """
        row_of = dict(zip(sequences, rows, strict=True))
        searches = list(dict.fromkeys(map(owner_of, sequences)))
        beams = [row for search in searches for row in rows_of(search)]
        rows = [row_of[beam] for beam in beams]
        outlooks = iter(self._outlooks(take_rows(logits, rows), beams))
        return {search: list(islice(outlooks, len(rows_of(search)))) for search in searches}

    def _outlooks(self, logits: Tensor, beams: list[Sequence]) -> list[Outlook]:
        """The outlook of each row of `logits` (num_rows, vocab)."""
        log_probs = logits.log_softmax(dim=-1)
        scores = self._apply_rules(logits, log_probs, beams)
        tops = top_log_probs(log_probs, [beam.request.output_config.num_top_log_probs for beam in beams])
        outlooks: dict[int, Outlook] = {}
        nums = [min(_search(beam).num_candidates, self._vocab_size) for beam in beams]
        for num in set(nums):  # among more candidates, equal ones could have another order
            places = [place for place, own in enumerate(nums) if own == num]
            for place, candidates in zip(places, _best(scores, log_probs, places, num), strict=True):
                outlooks[place] = Outlook(candidates, tops[place])
        return [outlooks[place] for place in range(len(beams))]

    def _apply_rules(self, logits: Tensor, log_probs: Tensor, beams: list[Sequence]) -> Tensor:
        """(num_rows, vocab) after functions of the user and rules; `log_probs` itself if there are none."""
        for beam in beams:
            if beam.search is not None:  # it begins
                beam.sampler_state = new_rules(beam, self._vocab_size)
        rules = [cast("LogitsRules | None", beam.sampler_state) for beam in beams]
        ruled = [RuledRow(place, beams[place], own) for place, own in enumerate(rules) if own is not None]
        processed = [place for place, beam in enumerate(beams) if beam.request.logits_post_processor_name is not None]
        scores = log_probs.clone() if ruled or processed else log_probs
        if processed:
            self._process(logits, scores, beams, processed)
        apply_rules(scores, ruled)
        return scores

    def _process(self, logits: Tensor, scores: Tensor, beams: list[Sequence], rows: list[int]) -> None:
        """Let functions of the user change these rows of `logits`, and `scores` as much, both (num_rows, vocab)."""
        assert self._post_processors is not None
        sums = logits[rows].logsumexp(dim=-1, keepdim=True)
        self._post_processors.apply(logits, beams)
        scores[rows] = logits[rows] - sums


def _best(scores: Tensor, log_probs: Tensor, places: list[int], num: int) -> list[list[AnyCandidate]]:
    """The best tokens of these rows, both tensors (num_rows, vocab), by their scores."""
    if len(places) < len(scores):
        scores, log_probs = scores[places], log_probs[places]
    values, token_ids = scores.topk(num, dim=-1)
    own = values if scores is log_probs else log_probs.gather(1, token_ids)
    rows = zip(token_ids.tolist(), values.tolist(), own.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def _search(beam: Sequence) -> BeamSearch:
    search = owner_of(beam).search
    assert search is not None
    return search


def advance_beams(outlooks: dict[Sequence, list[Outlook]]) -> list[Sequence]:
    """Continue the searches. Returns them."""
    for sequence, own in outlooks.items():
        _advance(sequence, own)
    return list(outlooks)


def _advance(sequence: Sequence, outlooks: list[Outlook]) -> None:
    """Continue a search, and say what its rows are in the next step."""
    if sequence.error is not None:
        return  # a function of the user has failed
    if not all(outlook.is_usable() for outlook in outlooks):
        sequence.fail("no token can be chosen: the model's logits are not numbers")
        return
    tops = [outlook.top or [] for outlook in outlooks] if sequence.request.output_config.num_top_log_probs else None
    steps = sequence.advance([outlook.candidates for outlook in outlooks], tops)
    beam_rows(sequence).advance(steps)
