"""The records and constants of `lmi_kernels.h`, which describes them, for ctypes."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import TypeAlias

import numpy as np

from handlers.lmi_dist.arrays import BFLOAT16, Array

ABI = 7
TOKENS_PER_BLOCK = 64
# The formats of packed weights. From BITS4 on they keep blocks: 4 or 8 bits with a scale and a
# minimum of 32 numbers, 8 bits with a scale of 16, and 4 or 8 bits with a scale and a zero point.
F32 = 0
BF16 = 1
INT8 = 2
BITS4 = 3
BITS8 = 4
BITS8_HALVES = 5
BITS4_ZERO = 6
BITS8_ZERO = 7
# The numbers of a row that share a scale in the formats from BITS4 on.
SMALL_GROUP = 32
DTYPE_NUMBERS = {
    np.dtype(np.float32): 0,
    BFLOAT16: 1,
    np.dtype(np.float16): 2,
}
# The fields of a program that a model has under the same names.
OF_PROGRAM = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_length",
    "num_sites",
)


class Panels(Structure):
    """A weight (num_out, num_in) in the form that products read, of one of the formats above.

    It may have channels of another format behind its own `num_own` panels, in `rest`.
    """

    # The memory that `data` points to.
    memory: Array


# It points to another of its kind.
Panels._fields_ = [
    ("num_out", c_int32),
    ("num_in", c_int32),
    ("format", c_int32),
    ("num_own", c_int32),
    ("data", c_void_p),
    ("rest", POINTER(Panels)),
]


class OpRecord(Structure):
    """An operation. Buffers have numbers."""

    _fields_ = [
        ("kind", c_int32),
        ("input", c_int32),
        ("output", c_int32),
        ("adds", c_int32),
        ("is_centred", c_int32),
        ("activation", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("num_pairs", c_int32),
        ("is_wanted", c_int32),
        ("table_dtype", c_int32),
        ("site", c_int32),
        ("low", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("weight", POINTER(Panels)),
        ("gate", POINTER(Panels)),
        ("bias", c_void_p),
        ("gate_bias", c_void_p),
        ("table", c_void_p),
        ("positions", c_void_p),
        ("norm", c_void_p),
        ("rotations", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
    ]


class SiteRecord(Structure):
    """What an adapter has for a linear. Panels without data stand for nothing."""

    _fields_ = [
        ("down", Panels),
        ("up", Panels),
        ("gate", Panels),
    ]


SiteRecords: TypeAlias = "ctypes.Array[SiteRecord]"
"""An adapter: a record for each site of the program."""


class BufferRecord(Structure):
    """A buffer of float32, (num_rows, width)."""

    _fields_ = [
        ("data", c_void_p),
        ("width", c_int32),
        ("num_rows", c_int32),
        ("is_wanted", c_int32),
        ("reserved", c_int32),
    ]


class ModelRecord(Structure):
    """A program with its buffers and its pool of blocks."""

    _fields_ = [
        ("ops", POINTER(OpRecord)),
        ("buffers", POINTER(BufferRecord)),
        ("pool", c_void_p),
        ("scratch", c_void_p),
        ("pool_bytes", c_int64),
        ("scratch_bytes", c_int64),
        ("num_ops", c_int32),
        ("num_buffers", c_int32),
        ("num_blocks", c_int32),
        *((name, c_int32) for name in OF_PROGRAM),
        ("kv_format", c_int32),
    ]


class StepRecord(Structure):
    """The chunks of a step and their adapters."""

    _fields_ = [
        ("ids", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("blocks", c_void_p),
        ("wanted", c_void_p),
        ("users", c_void_p),
        ("adapters", POINTER(POINTER(SiteRecord))),
        ("num_rows", c_int32),
        ("num_chunks", c_int32),
        ("num_blocks", c_int32),
        ("num_wanted", c_int32),
        ("num_adapters", c_int32),
        ("reserved", c_int32),
    ]


def address_of(array: Array) -> int:
    """Return the address of an array, which somebody must keep as long as the address is used."""
    return array.ctypes.data


def address_or_null(array: Array | None) -> int | None:
    """Return the address of an array, which somebody must keep, or None for null."""
    return None if array is None else array.ctypes.data
