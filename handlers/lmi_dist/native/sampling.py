"""What is wanted of the rows of a step's logits, one record for each wish, and the native library that fulfils it.

`lmi_kernels.h` describes the records. Ids that rules are about stand in lists that the wishes share: each takes as many
as it says, behind those of the wishes before it.
"""

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.native.library import Library

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[Any]

_FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency")
_INTS = ("top_k", "row", "changed", "mask", "position", "token_id", "wants_log_prob", "num_top", "num_candidates")
_NUMBERS = ("num_biased", "num_seen", "num_banned", "reserved")
WISH = np.dtype([("seed", "u8"), *((name, "f4") for name in _FLOATS), *((name, "i4") for name in _INTS + _NUMBERS)])
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

_ARRAYS: tuple[tuple[str, npt.DTypeLike, str], ...] = (  # the name of each, and of its length if it has one of its own
    ("logits", np.float32, "num_logits"),
    ("changed", np.float32, "num_changed"),
    ("masks", np.int32, "num_masks"),
    ("wishes", WISH, "num_wishes"),
    ("biased_ids", np.int32, "num_biased"),
    ("biases", np.float32, ""),
    ("seen_ids", np.int32, "num_seen"),
    ("counts", np.float32, ""),
    ("banned_ids", np.int32, "num_banned"),
)
_SIZES = ("logits", "changed", "masks", "vocab_size", "wishes", "biased", "seen", "banned", "best", "reserved")


class _Sampling(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*(name for name, _, _ in _ARRAYS), "choices", "best", "scratch")),
        ("scratch_bytes", c_int64),
        *((name if name in ("vocab_size", "reserved") else f"num_{name}", c_int32) for name in _SIZES),
    ]


class NativeSampler:
    """Not safe to call from two threads at once."""

    def __init__(self, library: Library, vocab_size: int, num_threads: int) -> None:
        self._functions, self._num_threads = library.functions, num_threads
        self._functions.lmi_sampling_bytes.argtypes, self._functions.lmi_sampling_bytes.restype = (c_int32,), c_int64
        self._functions.lmi_sample.argtypes = (POINTER(_Sampling), c_int32)
        self._scratch = np.empty(num_threads * self._functions.lmi_sampling_bytes(vocab_size), np.uint8)
        self._scratch_address = self._scratch.ctypes.data

    def __call__(self, sampling: Sampling) -> Fulfilled:
        """Raises ValueError, with nothing done, if a wish breaks a rule."""
        answers = Fulfilled(np.empty(len(sampling.wishes), CHOICE), np.empty(sampling.num_best, BEST))
        given = _Sampling(
            choices=_address(answers.choices),
            best=_address(answers.best),
            scratch=self._scratch_address,
            scratch_bytes=self._scratch.nbytes,
            vocab_size=sampling.logits.shape[1],
            num_best=len(answers.best),
        )
        for name, dtype, size in _ARRAYS:
            array = getattr(sampling, name)
            if array is not None and array.size:
                assert array.dtype == dtype and array.flags.c_contiguous
                setattr(given, name, array.ctypes.data)
                if size:
                    setattr(given, size, len(array))
        if self._functions.lmi_sample(byref(given), self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())
        return answers


def _address(array: Records) -> int | None:
    return array.ctypes.data if array.size else None
