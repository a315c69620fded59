"""The drafts of one step: how far each is right, by the tokens that are drawn from its rows of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from handlers.lmi_dist.out_of_memory import is_out_of_memory
from handlers.lmi_dist.sampler import Draw, append_draws
from handlers.lmi_dist.scheduler import Batch, drafter_of
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.wishes import Floats

Sample: TypeAlias = Callable[[Floats, list[int], list[EmbeddedSequence]], list[Draw | None]]


@dataclass(slots=True)
class Draft:
    """The draft in the chunk of a sequence. Row `row` of the logits is that of the token before the draft."""

    sequence: EmbeddedSequence
    token_ids: list[int]
    row: int
    num_right: int = 0

    def is_right(self) -> bool:
        """Whether the token drawn last is the next one of the draft."""
        is_over = self.sequence.is_finished or self.num_right == len(self.token_ids)
        return not is_over and self.sequence.token_ids[-1] == self.token_ids[self.num_right]


class Drafts:
    """The drafts in the decodes of a batch. `sample` draws a token for each sequence from its row of the logits."""

    def __init__(self, batch: Batch, sample: Sample) -> None:
        self._sample = sample
        self._drafts = [
            Draft(sequence, chunk.token_ids[1:], row)
            for chunk, sequence, row in zip(batch.plan.decodes, batch.decoding, batch.rows, strict=False)
            if len(chunk.token_ids) > 1
        ]

    def check(self, logits: Floats) -> None:
        """Keep what is right of each draft, by `logits` (num_logits, vocab).

        If memory runs out, the rest is dropped: the step must not be repeated.
        """
        try:
            self._accept(logits)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        for draft in self._drafts:
            drafter_of(draft.sequence).note(draft.num_right, len(draft.token_ids))

    def _accept(self, logits: Floats) -> None:
        """Draw the next token of each sequence whose draft has been right so far, until none is.

        Every token is drawn with the sampler's state that it has without a draft, so it is the same one.
        """
        place = 0
        while right := [draft for draft in self._drafts if draft.num_right == place and draft.is_right()]:
            place += 1
            sequences = [draft.sequence for draft in right]
            draws = self._sample(logits, [draft.row + place for draft in right], sequences)
            for draft in right:
                draft.num_right = place
                draft.sequence.num_computed += 1
            append_draws(sequences, draws)
