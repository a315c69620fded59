"""The wishes of a step: what is wanted of each row of its logits, in the records of
`lmi_kernels.h`, which describes them.

A wish is for a token, for the log-prob of one, or for the candidates of a beam search.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[Any]

WISH = np.dtype(
    [
        ("seed", "u8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("typical_p", "f4"),
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("top_k", "i4"),
        ("row", "i4"),
        ("changed", "i4"),
        ("mask", "i4"),
        ("position", "i4"),
        ("token_id", "i4"),
        ("wants_log_prob", "i4"),
        ("num_top", "i4"),
        ("num_candidates", "i4"),
        ("num_biased", "i4"),
        ("num_seen", "i4"),
        ("num_banned", "i4"),
        ("reserved", "i4"),
    ]
)
# The values of a wish for the best token, without rules, where they are not 0.
_DEFAULTS = {
    "top_p": 1,
    "typical_p": 1,
    "repetition": 1,
    "changed": -1,
    "mask": -1,
    "token_id": -1,
}
CHOICE = np.dtype(
    [
        ("status", "i4"),
        ("token_id", "i4"),
        ("log_prob", "f4"),
    ]
)
# The status of a choice.
CHOSEN = 0
NO_NUMBERS = 1
ALL_BANNED = 2
BEST = np.dtype(
    [
        ("token_id", "i4"),
        ("score", "f4"),
        ("log_prob", "f4"),
    ]
)
NO_INTS = np.empty(0, np.int32)
NO_FLOATS = np.empty(0, np.float32)


def new_wishes(num: int, **columns: Any) -> Records:
    """Return (num,) of WISH: for the best token of each row, without rules, where no column says
    otherwise.
    """
    wishes = np.zeros(num, WISH)
    for name, value in (_DEFAULTS | columns).items():
        wishes[name] = value

    return wishes


@dataclass(slots=True)
class Sampling:
    """The wishes of a step and what they are about.

    The ids that rules are about stand in lists that the wishes share: each takes as many as it
    says, behind those of the wishes before it. What fulfils the wishes writes to none of the
    arrays.
    """

    # (num_logits, vocab_size)
    logits: Floats
    # (num_wishes,) of WISH
    wishes: Records
    # (num_changed, vocab_size): rows that take the place of those of the logits
    changed: Floats | None = None
    # (num_masks, vocab_size / 32, rounded up): a bit for each token that may come
    masks: Ints | None = None
    biased_ids: Ints = field(default_factory=lambda: NO_INTS)
    # Parallel to `biased_ids`.
    biases: Floats = field(default_factory=lambda: NO_FLOATS)
    # What penalties count.
    seen_ids: Ints = field(default_factory=lambda: NO_INTS)
    # Parallel to `seen_ids`: how often each was generated.
    counts: Floats = field(default_factory=lambda: NO_FLOATS)
    banned_ids: Ints = field(default_factory=lambda: NO_INTS)

    @property
    def num_best(self) -> int:
        """How many records of BEST its wishes want, together."""
        return int(self.wishes["num_top"].sum() + self.wishes["num_candidates"].sum())


class Fulfilled(NamedTuple):
    """What came of wishes."""

    # (num_wishes,) of CHOICE
    choices: Records
    # (num_best,) of BEST: for each wish the best tokens by log-prob, then the candidates.
    best: Records


Fulfil: TypeAlias = Callable[[Sampling], Fulfilled]
"""Fulfils the wishes of a step. Raises ValueError, with nothing done, if one breaks a rule."""
