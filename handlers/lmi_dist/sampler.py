"""Draws a token from each row of a step's logits, as the request of the row wants it.

First functions of the user change a copy of the row. Then rules, such as penalties, and a guide
apply. Log-probs are the model's, from before all that.

What a request wants of its row is a record of `native/sampling_records.py`. One call samples all
rows of a step, in the native library or, without it, in `native/plain_sampling.py`, which says how
a token is drawn. What is drawn from a row does not depend on the other rows.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, repeat
from typing import TypeAlias

import numpy as np

from handlers.base.beams import AnyCandidate
from handlers.lmi_dist.guides import fill_masks
from handlers.lmi_dist.logits_rules import RuledRow, add_rules, new_rules
from handlers.lmi_dist.native.library import NotAvailable, load
from handlers.lmi_dist.native.plain_sampling import sample_plainly
from handlers.lmi_dist.native.sampling import NativeSampler
from handlers.lmi_dist.native.sampling_records import (
    ALL_BANNED,
    CHOSEN,
    ROW_PARAMS,
    Floats,
    Sample,
    Sampled,
    Sampling,
    new_row_params,
)
from handlers.lmi_dist.outlook import Outlook
from handlers.lmi_dist.post_processors import PostProcessors
from handlers.lmi_dist.sampler_state import SamplerState
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import SamplingConfig, TokenLogProb

MIN_TEMPERATURE = 1e-5
MAX_TOP_LOG_PROBS = 20
# A token, its log-prob if the request wants any, and the alternatives if it wants them: what
# `Sequence.append` takes.
Draw: TypeAlias = tuple[int, float, list[TokenLogProb] | None]


class Sampler:
    """Draws tokens. Its state of a sequence is kept in the sequence's `sampler_state`."""

    def __init__(
        self, vocab_size: int, post_processors: PostProcessors | None = None, num_threads: int = 1
    ) -> None:
        self.vocab_size = vocab_size
        self._post_processors = post_processors
        self.sample_rows: Sample = sample_plainly
        with suppress(NotAvailable):
            self.sample_rows = NativeSampler(load(), vocab_size, num_threads)

    def sample(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> list[Draw | None]:
        """Draw the next token of each sequence from its row of `logits`, (num_logits, vocab).

        A draw is None if logits of the row are not numbers, or if every token is banned. In the
        second case its request has failed.
        """
        states = [sequence.sampler_state or self.new_state(sequence) for sequence in sequences]
        choices, best = self.run(logits, rows, sequences, states)
        token_ids = choices["token_id"].tolist()
        log_probs = choices["log_prob"].tolist()
        # Most steps have no request that wants alternatives.
        tops: Iterable[list[TokenLogProb] | None] = repeat(None)
        if len(best):
            tops = _tops(iter(best.tolist()), states)

        draws: list[Draw | None] = list(zip(token_ids, log_probs, tops, strict=False))

        statuses = choices["status"]
        for place in np.flatnonzero(statuses != CHOSEN):
            draws[place] = None
            sequence = sequences[place]
            if statuses[place] == ALL_BANNED and sequence.error is None:
                sequence.fail_for_bans()

        return draws

    def look_ahead(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> dict[EmbeddedSequence, list[Outlook]]:
        """Return the tokens with which the beams of each search can continue, in their order.

        `logits` is (num_logits, vocab), float32. `rows` has the row of each of the `sequences`,
        which are beams, or searches that begin.
        """
        row_of = dict(zip(sequences, rows, strict=True))
        # Each search once, although it has a sequence for each of its beams.
        searches = dict.fromkeys(sequence.owner for sequence in sequences)
        beams: list[EmbeddedSequence] = []
        for search in searches:
            beams += search.beam_rows

        states = [self._state_of_beam(beam) for beam in beams]
        rows_of_beams = [row_of[beam] for beam in beams]
        choices, best = self.run(logits, rows_of_beams, beams, states)

        outlooks: dict[EmbeddedSequence, list[Outlook]] = {search: [] for search in searches}
        statuses = choices["status"].tolist()
        # For each beam in turn, the alternatives that its Result tells of, then the candidates.
        ranked = iter(best.tolist())
        for beam, state, status in zip(beams, states, statuses, strict=True):
            beam_search = beam.owner.search
            assert beam_search is not None
            num_candidates = min(beam_search.num_candidates, self.vocab_size)

            top = next_top(ranked, state.num_top)
            candidates = list(islice(ranked, num_candidates))
            outlook = Outlook(candidates, top, is_usable=status == CHOSEN)
            outlooks[beam.owner].append(outlook)

        return outlooks

    def _state_of_beam(self, beam: EmbeddedSequence) -> SamplerState:
        if beam.search is not None:
            # A search that begins: rows have none.
            return self.new_state(beam, beam.search.num_candidates)

        return beam.sampler_state or self.new_state(beam)

    def run(
        self,
        logits: Floats,
        rows: list[int],
        sequences: list[EmbeddedSequence],
        states: list[SamplerState],
    ) -> Sampled:
        """Apply functions of the user, guides and rules, and sample the rows of the sequences.

        Returns what each sequence wants of its row.
        """
        # A copy of their records, in which the fields of this step are set.
        records = bytearray(b"".join([state.params for state in states]))
        params = np.frombuffer(records, ROW_PARAMS)
        params["row"] = rows
        params["position"] = [sequence.num_generated for sequence in sequences]
        sampling = Sampling(logits, params)
        if self._post_processors is not None:
            self._change(self._post_processors, sampling, sequences)

        guided = [place for place, sequence in enumerate(sequences) if sequence.guide is not None]
        if guided:
            sampling.masks = fill_masks(sequences, guided, self.vocab_size)
            params["mask"][guided] = guided

        ruled = _ruled_rows(sequences, states)
        if ruled:
            add_rules(sampling, ruled)

        return self.sample_rows(sampling)

    def _change(
        self,
        post_processors: PostProcessors,
        sampling: Sampling,
        sequences: list[EmbeddedSequence],
    ) -> None:
        """Apply functions of the user to copies of the rows whose requests name one."""
        places: list[int] = []
        for place, sequence in enumerate(sequences):
            if sequence.request.logits_post_processor_name is not None:
                places.append(place)

        if places:
            params = sampling.params
            sampling.changed = sampling.logits[params["row"][places]]
            post_processors.apply(sampling.changed, [sequences[place] for place in places])
            params["changed"][places] = range(len(places))

    def new_state(self, sequence: EmbeddedSequence, num_candidates: int = 0) -> SamplerState:
        """Give a sequence its state. A search looks at `num_candidates` for each beam."""
        output = sequence.request.output_config
        rules = new_rules(sequence, self.vocab_size)
        num_top = min(output.num_top_log_probs, self.vocab_size)
        num_biased = 0
        if rules is not None and rules.bias is not None:
            num_biased = len(rules.bias.token_ids)

        params = new_row_params(
            1,
            seed=sequence.seed,
            num_top=num_top,
            num_candidates=min(num_candidates, self.vocab_size),
            wants_log_prob=output.return_log_probs or output.num_top_log_probs > 0,
            num_biased=num_biased,
            **filters_of(sequence.request.sampling_config, self.vocab_size),
        )

        state = SamplerState(params.tobytes(), num_top, rules)
        sequence.sampler_state = state
        return state


def _ruled_rows(sequences: list[EmbeddedSequence], states: list[SamplerState]) -> list[RuledRow]:
    """Return the rows that have rules."""
    ruled: list[RuledRow] = []
    for place, state in enumerate(states):
        if state.rules:
            sequence = sequences[place]
            ruled.append(RuledRow(place, sequence, state.rules, sequence.must_end))

    return ruled


def filters_of(config: SamplingConfig, vocab_size: int) -> dict[str, float]:
    """Return the parameters of a row that say how its token is chosen, as a request gives them."""
    temperature = 1.0
    if config.is_greedy:
        temperature = 0.0
    elif config.temperature is not None:
        temperature = max(config.temperature, MIN_TEMPERATURE)

    return {
        "temperature": temperature,
        "top_k": min(config.top_k or 0, vocab_size),
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "min_p": config.min_p or 0.0,
        "typical_p": 1.0 if config.typical_p is None else config.typical_p,
        "repetition": 1.0 if config.repetition_penalty is None else config.repetition_penalty,
        "presence": config.presence_penalty or 0.0,
        "frequency": config.frequency_penalty or 0.0,
    }


def append_draws(sequences: list[EmbeddedSequence], draws: list[Draw | None]) -> None:
    """Append to each sequence its token. A sequence without one fails."""
    for sequence, draw in zip(sequences, draws, strict=True):
        if sequence.error is not None:
            # It has failed before: by its guide, a function of the user, or bans.
            continue

        if draw is None:
            sequence.fail("no token can be chosen: the model's logits are not numbers")
        else:
            sequence.append(*draw)


def _tops(
    alternatives: Iterator[AnyCandidate], states: list[SamplerState]
) -> list[list[TokenLogProb] | None]:
    """Take the alternatives of each sequence from those of all, None for who wants none."""
    tops: list[list[TokenLogProb] | None] = []
    for state in states:
        tops.append(next_top(alternatives, state.num_top) if state.num_top else None)

    return tops


def next_top(alternatives: Iterator[AnyCandidate], num_top: int) -> list[TokenLogProb]:
    """Take the next alternatives from those of all sequences."""
    return [
        TokenLogProb(token_id, log_prob) for token_id, _, log_prob in islice(alternatives, num_top)
    ]
