"""Fulfils wishes with the native library: see `lmi_kernels.h`."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.wishes import BEST, CHOICE, WISH, Fulfilled, Records, Sampling

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
        self._functions, self._num_threads = library._functions, num_threads
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
