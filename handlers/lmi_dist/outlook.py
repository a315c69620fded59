"""The candidates for the next tokens of a beam search, and the step that they make.

Candidates are the tokens with the best log-probs after functions of the user, rules and guides, as
in transformers.
"""

from typing import NamedTuple

from handlers.base.beams import AnyCandidate
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import TokenLogProb


class Outlook(NamedTuple):
    """What may come next in one beam."""

    candidates: list[AnyCandidate]
    # The alternatives that a Result lists.
    top: list[TokenLogProb]
    # Whether its logits are numbers, also after functions of the user.
    is_usable: bool


def advance_beams(outlooks: dict[EmbeddedSequence, list[Outlook]]) -> list[EmbeddedSequence]:
    """Advance each search by a token, and set which beam each of its rows computes next.

    `outlooks` has those of the beams of each search, in their order. Returns the searches. One
    whose logits are not numbers fails.
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
