"""What is wanted of the rows of a step's logits, as arrays that native code reads: one record for each wish.

`native/lmi_kernels.h` describes the records. Ids that rules are about stand in lists that the wishes share: each takes
as many as it says, behind those of the wishes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[Any]

_FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency")
_INTS = ("top_k", "row", "changed", "mask", "position", "token_id", "wants_log_prob", "num_top", "num_candidates")
_SIZES = ("num_biased", "num_seen", "num_banned", "reserved")
WISH = np.dtype([("seed", "u8"), *((name, "f4") for name in _FLOATS), *((name, "i4") for name in _INTS + _SIZES)])
CHOICE = np.dtype([("status", "i4"), ("token_id", "i4"), ("log_prob", "f4")])
BEST = np.dtype([("token_id", "i4"), ("score", "f4"), ("log_prob", "f4")])
CHOSEN, NO_NUMBERS, ALL_BANNED = range(3)  # the status of a choice
NO_INTS, NO_FLOATS = np.empty(0, np.int32), np.empty(0, np.float32)


def new_wishes(num: int, **columns: Any) -> Records:
    """The best token of each row, without rules, where no column says otherwise."""
    wishes = np.zeros(num, WISH)
    none = {"top_p": 1, "typical_p": 1, "repetition": 1, "changed": -1, "mask": -1, "token_id": -1}
    for name, value in (none | columns).items():
        wishes[name] = value
    return wishes


@dataclass(slots=True)
class Sampling:
    """Wishes and what they are about. Nothing in it is written."""

    logits: Floats  # (num_logits, vocab_size)
    wishes: Records  # (num_wishes) of WISH
    changed: Floats | None = None  # (num_changed, vocab_size): rows that take the place of those of the logits
    masks: Ints | None = None  # (num_masks, vocab_size / 32, rounded up): a bit for each token that may come
    biased_ids: Ints = field(default_factory=lambda: NO_INTS)
    biases: Floats = field(default_factory=lambda: NO_FLOATS)  # parallel to `biased_ids`
    seen_ids: Ints = field(default_factory=lambda: NO_INTS)  # what penalties count
    counts: Floats = field(default_factory=lambda: NO_FLOATS)  # parallel: how often each was generated
    banned_ids: Ints = field(default_factory=lambda: NO_INTS)

    @property
    def num_best(self) -> int:
        return int(self.wishes["num_top"].sum() + self.wishes["num_candidates"].sum())


class Fulfilled(NamedTuple):
    choices: Records  # (num_wishes) of CHOICE
    best: Records  # of BEST; of each wish the best tokens by log-prob, then the candidates


Choose: TypeAlias = Callable[[Sampling], Fulfilled]
