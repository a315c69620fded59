"""The native sampler, which samples the rows of a step in one call of the library.

`lmi_kernels.h` describes its records, and `plain_sampling.py` has its rules in short.
"""

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native.sampling_records import (
    BEST,
    CHOICE,
    ROW_PARAMS,
    Records,
    Sampled,
    Sampling,
)


class _ArrayField(NamedTuple):
    """An array of a Sampling, its dtype, and the field of its length if it has one of its own."""

    name: str
    dtype: npt.DTypeLike
    length_name: str = ""


_ARRAYS = (
    _ArrayField("logits", np.float32, "num_logits"),
    _ArrayField("changed", np.float32, "num_changed"),
    _ArrayField("masks", np.int32, "num_masks"),
    _ArrayField("params", ROW_PARAMS, "num_params"),
    _ArrayField("biased_ids", np.int32, "num_biased"),
    _ArrayField("biases", np.float32),
    _ArrayField("seen_ids", np.int32, "num_seen"),
    _ArrayField("counts", np.float32),
    _ArrayField("banned_ids", np.int32, "num_banned"),
)


class _SamplingRecord(Structure):
    """A Sampling, and where its results go."""

    _fields_ = [
        *((array.name, c_void_p) for array in _ARRAYS),
        ("choices", c_void_p),
        ("best", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
        ("num_logits", c_int32),
        ("num_changed", c_int32),
        ("num_masks", c_int32),
        ("vocab_size", c_int32),
        ("num_params", c_int32),
        ("num_biased", c_int32),
        ("num_seen", c_int32),
        ("num_banned", c_int32),
        ("num_best", c_int32),
        ("reserved", c_int32),
    ]


class NativeSampler:
    """Samples rows by the library, on its threads. Not safe to call from two threads at once."""

    def __init__(self, library: Library, vocab_size: int, num_threads: int) -> None:
        self._functions = library.functions
        self._num_threads = num_threads
        self._functions.lmi_sampling_bytes.argtypes = (c_int32,)
        self._functions.lmi_sampling_bytes.restype = c_int64
        self._functions.lmi_sample.argtypes = (POINTER(_SamplingRecord), c_int32)

        thread_bytes = self._functions.lmi_sampling_bytes(vocab_size)
        self._scratch = np.empty(num_threads * thread_bytes, np.uint8)
        self._scratch_address = self._scratch.ctypes.data

    def __call__(self, sampling: Sampling) -> Sampled:
        """Raises ValueError, with nothing done, if the parameters of a row break a rule."""
        choices = np.empty(len(sampling.params), CHOICE)
        best = np.empty(sampling.num_best, BEST)
        record = _SamplingRecord(
            choices=_address_unless_empty(choices),
            best=_address_unless_empty(best),
            scratch=self._scratch_address,
            scratch_bytes=self._scratch.nbytes,
            vocab_size=sampling.logits.shape[1],
            num_best=len(best),
        )
        for name, dtype, length_name in _ARRAYS:
            array = getattr(sampling, name)
            if array is not None and array.size:
                assert array.dtype == dtype and array.flags.c_contiguous
                setattr(record, name, array.ctypes.data)
                if length_name:
                    setattr(record, length_name, len(array))

        if self._functions.lmi_sample(byref(record), self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())

        return Sampled(choices, best)


def _address_unless_empty(array: Records) -> int | None:
    return array.ctypes.data if array.size else None
