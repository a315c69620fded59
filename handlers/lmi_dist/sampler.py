"""Draws a token from each row of the logits, by the rules of the row's request.

Log-probs are the model's, before any rule. Functions of the user change a copy of the row, then
rules and a guide. What is wanted of each row is a record of `native/wishes.py`, and one call
fulfils those of a step; `native/plain_sampling.py` says how a token is drawn. The bits of a row
depend on it alone. The candidates of a beam search are the best log-probs of the model after such
changes, as in transformers.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, repeat
from typing import NamedTuple, TypeAlias

import numpy as np

from handlers.base.beams import AnyCandidate
from handlers.base.sequence import Sequence
from handlers.lmi_dist.guides import fill_masks
from handlers.lmi_dist.logits_rules import RuledRow, add_rules, new_rules
from handlers.lmi_dist.native.library import NotAvailable, load
from handlers.lmi_dist.native.plain_sampling import fulfil_plainly
from handlers.lmi_dist.native.sampling import NativeSampler
from handlers.lmi_dist.native.wishes import (
    ALL_BANNED,
    CHOSEN,
    WISH,
    Floats,
    Fulfil,
    Fulfilled,
    Sampling,
    new_wishes,
)
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.post_processors import PostProcessors
from handlers.lmi_dist.sampler_state import SamplerState
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import PromptLogProb, SamplingConfig, TokenLogProb

MIN_TEMPERATURE = 1e-5
MAX_TOP_LOG_PROBS = 20
# A token, its log-prob if the request wants any, and the alternatives if it wants them: what
# `Sequence.append` takes.
Draw: TypeAlias = tuple[int, float, list[TokenLogProb] | None]


class Outlook(NamedTuple):
    """What may come next in one row: candidates, and the alternatives that a Result lists."""

    candidates: list[AnyCandidate]
    top: list[TokenLogProb]
    # Whether the row's logits are numbers, after functions of the user too.
    is_usable: bool


class Sampler:
    """A sampler draws tokens.

    It keeps the state of a sequence in its `sampler_state` and has none itself.
    """

    def __init__(
        self, vocab_size: int, post_processors: PostProcessors | None = None, num_threads: int = 1
    ) -> None:
        self.vocab_size = vocab_size
        self._post_processors = post_processors
        self.fulfil_wishes: Fulfil = fulfil_plainly
        with suppress(NotAvailable):
            self.fulfil_wishes = NativeSampler(load(), vocab_size, num_threads)

    def sample(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> list[Draw | None]:
        """Draw the next token of each sequence from its row of `logits`, (num_logits, vocab).

        A draw is None if the row's logits are not numbers, or every token is banned, and then its
        request has failed.
        """
        states = [sequence.sampler_state or self.new_state(sequence) for sequence in sequences]
        choices, best = self.fulfil(logits, rows, sequences, states)
        tops: Iterable[list[TokenLogProb] | None] = repeat(None)
        if len(best):
            tops = _tops(iter(best.tolist()), states)

        token_ids = choices["token_id"].tolist()
        log_probs = choices["log_prob"].tolist()
        draws: list[Draw | None] = list(zip(token_ids, log_probs, tops, strict=False))
        for place in np.flatnonzero(choices["status"] != CHOSEN):
            draws[place] = None
            if choices["status"][place] == ALL_BANNED and sequences[place].error is None:
                sequences[place].fail_for_bans()

        return draws

    def look_ahead(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> dict[EmbeddedSequence, list[Outlook]]:
        """What each search can continue with, in the order of its beams.

        `logits` is (num_logits, vocab), float32. `rows` has the row of each of the `sequences`,
        which are rows of searches, or searches that begin.
        """
        row_of = dict(zip(sequences, rows, strict=True))
        searches = list(dict.fromkeys(beam.owner for beam in sequences))
        beams = [beam for sequence in searches for beam in sequence.beam_rows]
        for beam in beams:
            # Only the head has a search, before it has rows.
            if beam.search is not None:
                self.new_state(beam, beam.search.num_candidates)

        states = [beam.sampler_state or self.new_state(beam) for beam in beams]
        choices, best = self.fulfil(logits, [row_of[beam] for beam in beams], beams, states)

        ranked = iter(best.tolist())
        outlooks = dict[EmbeddedSequence, list[Outlook]]()
        for beam, state, status in zip(beams, states, choices["status"].tolist(), strict=True):
            search = beam.owner.search
            assert search is not None

            top = _top(ranked, state.num_top)
            candidates = list(islice(ranked, min(search.num_candidates, self.vocab_size)))
            outlooks.setdefault(beam.owner, []).append(Outlook(candidates, top, status == CHOSEN))

        return outlooks

    def fulfil(
        self,
        logits: Floats,
        rows: list[int],
        sequences: list[EmbeddedSequence],
        states: list[SamplerState],
    ) -> Fulfilled:
        """What the sequences wish of their rows of `logits`, after functions of the user, rules and
        guides.
        """
        wishes = np.frombuffer(bytearray(b"".join([state.wish for state in states])), WISH)
        wishes["row"] = rows
        wishes["position"] = [len(row.token_ids) - row.num_prompt_tokens for row in sequences]
        sampling = Sampling(logits, wishes)
        if self._post_processors is not None:
            self._change(self._post_processors, sampling, sequences)

        guided = [place for place, sequence in enumerate(sequences) if sequence.guide is not None]
        if guided:
            sampling.masks = fill_masks(sequences, guided, self.vocab_size)
            wishes["mask"][guided] = guided

        ruled: list[RuledRow] = []
        for place, state in enumerate(states):
            if state.rules:
                sequence = sequences[place]
                ruled.append(RuledRow(place, sequence, state.rules, sequence.must_end))

        if ruled:
            add_rules(sampling, ruled)

        return self.fulfil_wishes(sampling)

    def _change(
        self,
        post_processors: PostProcessors,
        sampling: Sampling,
        sequences: list[EmbeddedSequence],
    ) -> None:
        """Let functions of the user change copies of the rows whose requests name one."""
        places: list[int] = []
        for place, sequence in enumerate(sequences):
            if sequence.request.logits_post_processor_name is not None:
                places.append(place)

        if places:
            wishes = sampling.wishes
            sampling.changed = sampling.logits[wishes["row"][places]]
            post_processors.apply(sampling.changed, [sequences[place] for place in places])
            wishes["changed"][places] = range(len(places))

    def new_state(self, sequence: EmbeddedSequence, num_candidates: int = 0) -> SamplerState:
        """Begin a sequence, or a search that looks at so many candidates."""
        output = sequence.request.output_config
        rules = new_rules(sequence, self.vocab_size)
        num_top = min(output.num_top_log_probs, self.vocab_size)
        num_biased = 0
        if rules is not None and rules.bias is not None:
            num_biased = len(rules.bias.token_ids)

        wish = new_wishes(
            1,
            seed=sequence.seed,
            num_top=num_top,
            num_candidates=min(num_candidates, self.vocab_size),
            wants_log_prob=output.return_log_probs or output.num_top_log_probs > 0,
            num_biased=num_biased,
            **filters_of(sequence.request.sampling_config, self.vocab_size),
        )

        state = SamplerState(wish.tobytes(), num_top, rules)
        sequence.sampler_state = state
        return state


def filters_of(config: SamplingConfig, vocab_size: int) -> dict[str, float]:
    """Of a wish, what a request says of how to choose."""
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
    """Append to each sequence its token, or end its request with an error if it has none."""
    for sequence, draw in zip(sequences, draws, strict=True):
        if sequence.error is not None:
            # A row, its guide or a function of the user has failed.
            continue

        if draw is None:
            sequence.fail("no token can be chosen: the model's logits are not numbers")
        else:
            sequence.append(*draw)


def _tops(
    alternatives: Iterator[AnyCandidate], states: list[SamplerState]
) -> list[list[TokenLogProb] | None]:
    """The alternatives of each sequence whose request wants some, out of those of all."""
    tops: list[list[TokenLogProb] | None] = []
    for state in states:
        tops.append(_top(alternatives, state.num_top) if state.num_top else None)

    return tops


def _top(alternatives: Iterator[AnyCandidate], num: int) -> list[TokenLogProb]:
    """The next alternatives of those of all sequences."""
    return [TokenLogProb(token_id, log_prob) for token_id, _, log_prob in islice(alternatives, num)]


def note_prompt(fulfil: Fulfil, sequence: Sequence, chunk: Chunk, logits: Floats) -> bool:
    """Keep the log-probs of the prompt tokens that follow each position of the chunk.

    `logits` is (chunk length, vocab). Returns False, and keeps none, if one of them is not a
    number.
    """
    next_ids = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
    # Nothing is before the first token.
    log_probs = sequence.prompt_log_probs or [PromptLogProb(None)]
    log_probs = log_probs[: chunk.start + 1]
    if next_ids:
        num = len(next_ids)
        num_top = min(sequence.request.output_config.num_prompt_log_probs or 0, logits.shape[1])
        wishes = new_wishes(
            num, row=np.arange(num), token_id=next_ids, num_top=num_top, wants_log_prob=1
        )
        choices, best = fulfil(Sampling(logits, wishes))
        if (choices["status"] != CHOSEN).any():
            return False

        alternatives = iter(best.tolist())
        for log_prob in choices["log_prob"].tolist():
            log_probs.append(PromptLogProb(log_prob, _top(alternatives, num_top)))

    sequence.prompt_log_probs = log_probs
    return True


def advance_beams(outlooks: dict[EmbeddedSequence, list[Outlook]]) -> list[EmbeddedSequence]:
    """Continue the searches, and say what the rows of each are in the next step.

    Returns the searches.
    """
    for sequence, outlooks_of_search in outlooks.items():
        if sequence.error is not None:
            # A function of the user has failed.
            continue

        if not all(outlook.is_usable for outlook in outlooks_of_search):
            sequence.fail("no token can be chosen: the model's logits are not numbers")
            continue

        tops = None
        if sequence.request.output_config.num_top_log_probs:
            tops = [outlook.top for outlook in outlooks_of_search]

        candidates = [outlook.candidates for outlook in outlooks_of_search]
        steps = sequence.advance(candidates, tops)
        assert sequence.beam_state is not None
        sequence.beam_state.advance(steps)

    return list(outlooks)
