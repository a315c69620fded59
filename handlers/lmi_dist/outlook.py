"""What the beams of a search can continue with.

The candidates are the best log-probs of the model after functions of the user, rules and guides, as
in transformers.
"""

from typing import NamedTuple

from handlers.base.beams import AnyCandidate
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import TokenLogProb


class Outlook(NamedTuple):
    """What may come next in one row: candidates, and the alternatives that a Result lists."""

    candidates: list[AnyCandidate]
    top: list[TokenLogProb]
    # Whether the row's logits are numbers, after functions of the user too.
    is_usable: bool


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
