"""Which tokens of the drafts of a step are right.

Every token is drawn with the sampler's state that it has without a draft, so it is the same one.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from handlers.lmi_dist.sampler import Draw, append_draws
from handlers.lmi_dist.scheduled_batch import Batch
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import is_out_of_memory
from lmi.executor import SpecDecodingStats

# Draws a token for each sequence from its row of the step's logits.
Sample: TypeAlias = Callable[[list[int], list[EmbeddedSequence]], list[Draw | None]]


class Draft(NamedTuple):
    """The draft of a decode, and the row of the logits of the token before it."""

    sequence: EmbeddedSequence
    token_ids: list[int]
    row: int

    def is_right(self, place: int) -> bool:
        """Whether the token that was drawn last is that at `place` of the draft, if it has one."""
        drafted = self.token_ids[place : place + 1]
        return self.sequence.token_ids[-1:] == drafted and not self.sequence.is_finished


def check_drafts(batch: Batch, sample: Sample) -> SpecDecodingStats | None:
    """Append what is right of each draft, and the token behind it. Returns how much that is.

    If memory runs out, the rest is dropped: the step must not be repeated.
    """
    drafts = _drafts_of(batch)
    if not drafts:
        return None

    num_right = Counter[EmbeddedSequence]()
    try:
        _append_right(drafts, sample, num_right)
    except Exception as error:
        if not is_out_of_memory(error):
            raise

    for draft in drafts:
        drafter = draft.sequence.drafter
        assert drafter is not None
        drafter.note(num_right[draft.sequence], len(draft.token_ids))

    return SpecDecodingStats(
        num_requests_with_draft_tokens=len(drafts),
        num_draft_tokens=sum(len(draft.token_ids) for draft in drafts),
        num_accepted_tokens=num_right.total(),
    )


def _drafts_of(batch: Batch) -> list[Draft]:
    drafts: list[Draft] = []
    decodes = zip(batch.plan.decodes, batch.decoding, batch.rows, strict=False)
    for chunk, sequence, row in decodes:
        if len(chunk.token_ids) > 1:
            drafts.append(Draft(sequence, chunk.token_ids[1:], row))

    return drafts


def _append_right(
    drafts: list[Draft], sample: Sample, num_right: Counter[EmbeddedSequence]
) -> None:
    """Draw the next token of each sequence while its draft foretold the last one, and count
    them.
    """
    place = 0
    right = [draft for draft in drafts if draft.is_right(place)]
    while right:
        place += 1
        sequences = [draft.sequence for draft in right]
        draws = sample([draft.row + place for draft in right], sequences)
        num_right.update(sequences)
        for sequence in sequences:
            sequence.num_computed += 1

        append_draws(sequences, draws)
        right = [draft for draft in right if draft.is_right(place)]
