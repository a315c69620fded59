"""Fulfils wishes with the native library: see `lmi_kernels.h`."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.wishes import BEST, CHOICE, WISH, Answers, Sampling

_ARRAYS: dict[str, npt.DTypeLike] = {
    "logits": np.float32,
    "changed": np.float32,
    "masks": np.int32,
    "wishes": WISH,
    "biased_ids": np.int32,
    "biases": np.float32,
    "seen_ids": np.int32,
    "counts": np.float32,
    "banned_ids": np.int32,
}
_SIZES = ("logits", "changed", "masks", "vocab_size", "wishes", "biased", "seen", "banned", "best", "reserved")


class _Sampling(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*_ARRAYS, "choices", "best", "scratch")),
        ("scratch_bytes", c_int64),
        *((name if name in ("vocab_size", "reserved") else f"num_{name}", c_int32) for name in _SIZES),
    ]


class NativeSampler:
    """Not safe to call from two threads at once."""

    def __init__(self, library: Library, vocab_size: int, num_threads: int) -> None:
        self._functions, self._num_threads = library._functions, num_threads
        self._functions.lmi_sampling_bytes.argtypes, self._functions.lmi_sampling_bytes.restype = (c_int32,), c_int64
        self._functions.lmi_sample.argtypes = (POINTER(_Sampling), c_int32)
        self._scratch = np.empty(num_threads * self._functions.lmi_sampling_bytes(vocab_size), np.uint8)

    def __call__(self, sampling: Sampling) -> Answers:
        """Raises ValueError, with nothing done, if a wish breaks a rule."""
        num_logits, vocab_size = sampling.logits.shape
        answers = Answers(np.empty(len(sampling.wishes), CHOICE), np.empty(sampling.num_best, BEST))
        given = _Sampling(
            **{name: _pointer(getattr(sampling, name), dtype) for name, dtype in _ARRAYS.items()},
            choices=_pointer(answers.choices, CHOICE),
            best=_pointer(answers.best, BEST),
            scratch=_pointer(self._scratch, np.uint8),
            scratch_bytes=self._scratch.nbytes,
            vocab_size=vocab_size,
            num_logits=num_logits,
            num_changed=0 if sampling.changed is None else len(sampling.changed),
            num_masks=0 if sampling.masks is None else len(sampling.masks),
            num_wishes=len(sampling.wishes),
            num_biased=len(sampling.biased_ids),
            num_seen=len(sampling.seen_ids),
            num_banned=len(sampling.banned_ids),
            num_best=len(answers.best),
        )
        if self._functions.lmi_sample(byref(given), self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())
        return answers


def _pointer(array: npt.NDArray[np.generic] | None, dtype: npt.DTypeLike) -> int | None:
    if array is None or not array.size:
        return None
    assert array.dtype == dtype and array.flags.c_contiguous
    return array.ctypes.data
