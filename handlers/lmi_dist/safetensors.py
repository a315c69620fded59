"""Tensors of checkpoints as numpy arrays, and the reader of the format safetensors.

numpy has no bfloat16: an array of uint16 is the bits of such numbers.

A file of safetensors is 8 bytes with the size of a header, the header, then the tensors' bytes. The header is JSON: for
each tensor its dtype, shape, and where its bytes begin and end. The file is mapped, so what is not read costs no
memory. Source: the format's description in Hugging Face's safetensors.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

BFLOAT16 = np.dtype(np.uint16)
NAMES = {np.dtype(np.float32): "float32", BFLOAT16: "bfloat16", np.dtype(np.float16): "float16"}


def is_float(array: Array) -> bool:
    """Whether it is one of the floats that weights have here."""
    return array.dtype in NAMES


def as_float32(array: Array) -> Array:
    """The same numbers in float32. Every float of 16 bits is one exactly."""
    if array.dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def dtype_name(array: Array) -> str:
    return NAMES.get(array.dtype, array.dtype.name)


MAX_HEADER_BYTES = 100_000_000
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor; `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile(Mapping[str, Array]):
    """The tensors of a file by name, read-only arrays of its mapped bytes. Raises ValueError for a broken file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            num_header_bytes = int.from_bytes(file.read(8), "little")
            num_bytes = path.stat().st_size - 8 - num_header_bytes
            if num_bytes < 0 or num_header_bytes > MAX_HEADER_BYTES:
                raise ValueError("it ends within its header")
            self._entries = _entries(file.read(num_header_bytes))
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = 8 + num_header_bytes
        for name, entry in self._entries.items():
            _check(name, entry, num_bytes)

    def __getitem__(self, name: str) -> Array:
        """Raises ValueError for a dtype that is not read here."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"its dtype {entry.dtype} is not read here, only {', '.join(DTYPES)}")
        dtype, num = DTYPES[entry.dtype], math.prod(entry.shape)
        array: Array = np.frombuffer(self._data, dtype, num, self._start + entry.data_offsets[0])
        return (array if array.flags.aligned else array.copy()).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _entries(header: bytes) -> dict[str, TensorEntry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return {
            name: msgspec.json.decode(text, type=TensorEntry) for name, text in raw.items() if name != "__metadata__"
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"its header is wrong: {error}") from error


def _check(name: str, entry: TensorEntry, num_bytes: int) -> None:
    start, end = entry.data_offsets
    if not 0 <= start <= end <= num_bytes:
        raise ValueError(f"tensor {name} lies in bytes {start} to {end} of {num_bytes}")
    dtype = DTYPES.get(entry.dtype)
    if min(entry.shape, default=0) < 0 or (dtype and math.prod(entry.shape) * dtype.itemsize != end - start):
        raise ValueError(f"tensor {name} has {end - start} bytes, which are not {entry.dtype} of {entry.shape}")
