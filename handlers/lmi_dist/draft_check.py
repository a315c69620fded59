"""Which tokens of the drafts of a step are right: those that are drawn anyway.

A token is drawn from the same row of logits, with the same state of the sampler, as without a
draft. So drafts change no answer.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from handlers.lmi_dist.sampler import Draw, append_draws
from handlers.lmi_dist.scheduled_batch import Batch
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import is_out_of_memory
from lmi.executor import SpecDecodingStats

# Takes rows of the step's logits and the sequence of each, and draws their next tokens.
Sample: TypeAlias = Callable[[list[int], list[EmbeddedSequence]], list[Draw | None]]


class Draft(NamedTuple):
    """The draft of a decode."""

    sequence: EmbeddedSequence
    token_ids: list[int]
    # The row of the logits from which its first token is drawn.
    row: int

    def foretold_last(self, place: int) -> bool:
        """Whether the sequence goes on, and its last token is the one at `place` of the draft."""
        if self.sequence.is_finished or place >= len(self.token_ids):
            return False

        return self.sequence.token_ids[-1] == self.token_ids[place]


def check_drafts(batch: Batch, sample: Sample) -> SpecDecodingStats | None:
    """Append to each sequence what is right of its draft, and the token behind it.

    The step has appended one token already, which is drawn from the row before the draft. Returns
    how many drafted tokens were right, or None if there are no drafts.

    If memory runs out, no further token is appended: the step must not be repeated.
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
    # The rows of prompts follow those of decodes.
    decodes = zip(batch.plan.decodes, batch.decoding, batch.rows, strict=False)
    for chunk, sequence, row in decodes:
        # The first token is the one that the decode computes.
        drafted_ids = chunk.token_ids[1:]
        if drafted_ids:
            drafts.append(Draft(sequence, drafted_ids, row))

    return drafts


def _append_right(
    drafts: list[Draft], sample: Sample, num_right: Counter[EmbeddedSequence]
) -> None:
    """Draw the next token of each sequence, as long as its draft foretold the last one.

    Adds to `num_right` how many tokens of each draft were right.
    """
    place = 0
    right_drafts = [draft for draft in drafts if draft.foretold_last(place)]
    while right_drafts:
        # The row of a token that was right has the logits of the one behind it.
        place += 1
        sequences = [draft.sequence for draft in right_drafts]
        rows = [draft.row + place for draft in right_drafts]
        draws = sample(rows, sequences)

        num_right.update(sequences)
        for sequence in sequences:
            sequence.num_computed += 1

        append_draws(sequences, draws)
        right_drafts = [draft for draft in right_drafts if draft.foretold_last(place)]
