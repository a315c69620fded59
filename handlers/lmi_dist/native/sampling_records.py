"""What is wanted of the rows of logits in a step, and what becomes of them, in the records of
`lmi_kernels.h`, which describes them.

Wanted is a token, the log-prob of one, or the candidates of a beam search.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[Any]

ROW_PARAMS = np.dtype(
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
# The values that ask for the best token, without rules, where they are not 0.
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


def new_row_params(num: int, **columns: Any) -> Records:
    """Return (num,) of ROW_PARAMS, which want the best token, without rules, where no column says
    otherwise.
    """
    params = np.zeros(num, ROW_PARAMS)
    for name, value in (_DEFAULTS | columns).items():
        params[name] = value

    return params


class Sampling(Struct):
    """The parameters of the rows that are sampled in a step, and what they are about.

    The ids that rules are about stand in lists that the rows share: each takes as many as its
    parameters say, behind those of the rows before it. A sampler writes to none of the arrays.
    """

    # (num_logits, vocab_size)
    logits: Floats
    # (num_params,) of ROW_PARAMS
    params: Records
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
        """How many records of BEST its rows want, together."""
        return int(self.params["num_top"].sum() + self.params["num_candidates"].sum())


class Sampled(NamedTuple):
    """What became of the rows of a Sampling."""

    # (num_params,) of CHOICE
    choices: Records
    # (num_best,) of BEST: for each row the best tokens by log-prob, then the candidates.
    best: Records


Sample: TypeAlias = Callable[[Sampling], Sampled]
"""Samples the rows of a step. Raises ValueError, with nothing done, if one breaks a rule."""
