"""A file in the format safetensors, whose tensors are arrays of its mapped bytes."""

import math
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from handlers.lmi_dist.arrays import BFLOAT16, Array

# The header begins behind its own size.
SIZE_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor; `data_offsets` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """The bytes of its data."""
        start, end = self.data_offsets
        return end - start


class SafetensorsFile(Mapping[str, Array]):
    """The tensors of a file by name, as read-only arrays of its mapped bytes.

    The file is 8 bytes with the size of a header, the header, then the tensors' bytes. The header
    is JSON: for each tensor its dtype, shape, and where its bytes begin and end. Source: Hugging
    Face's description of the format.
    """

    def __init__(self, path: Path) -> None:
        """Map a file. Raises OSError, or ValueError for a broken one."""
        with path.open("rb") as file:
            num_header_bytes = int.from_bytes(file.read(SIZE_BYTES), "little")
            num_bytes = path.stat().st_size - SIZE_BYTES - num_header_bytes
            if num_bytes < 0 or num_header_bytes > MAX_HEADER_BYTES:
                raise ValueError("it ends within its header")

            self._entries = _entries(file.read(num_header_bytes))
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        self._start = SIZE_BYTES + num_header_bytes
        for name, entry in self._entries.items():
            _check(name, entry, num_bytes)

    def __getitem__(self, name: str) -> Array:
        """Raises ValueError for a dtype that is not read here."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"its dtype {entry.dtype} is not read here, only {', '.join(DTYPES)}")

        dtype = DTYPES[entry.dtype]
        num_elements = math.prod(entry.shape)
        start = self._start + entry.data_offsets[0]
        array: Array = np.frombuffer(self._data, dtype, num_elements, start)
        if not array.flags.aligned:
            array = array.copy()

        return array.reshape(entry.shape)

    def sizes(self) -> Counter[np.dtype[Any]]:
        """Return how many bytes the tensors of each dtype have."""
        sizes = Counter[np.dtype[Any]]()
        for entry in self._entries.values():
            if entry.dtype in DTYPES:
                sizes[DTYPES[entry.dtype]] += entry.num_bytes

        return sizes

    def release_pages(self) -> None:
        """Let go of the pages that were read. What is read again comes from the page cache."""
        # There are file systems that know no advice.
        with suppress(OSError):
            self._data.madvise(mmap.MADV_DONTNEED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _entries(header: bytes) -> dict[str, TensorEntry]:
    """Return what a header says of each tensor, by name. Raises ValueError."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(text, type=TensorEntry) for name, text in raw.items()}
    except msgspec.DecodeError as error:
        raise ValueError(f"its header is wrong: {error}") from error


def _check(name: str, entry: TensorEntry, num_bytes: int) -> None:
    """Raise ValueError unless the tensor lies in the file's `num_bytes` of data, and has as many as
    its dtype and shape need.
    """
    start, end = entry.data_offsets
    if not 0 <= start <= end <= num_bytes:
        raise ValueError(f"tensor {name} lies in bytes {start} to {end} of {num_bytes}")

    if not _has_its_size(entry):
        raise ValueError(
            f"tensor {name} has {entry.num_bytes} bytes, which are not {entry.dtype} of "
            f"{entry.shape}"
        )


def _has_its_size(entry: TensorEntry) -> bool:
    """Whether a tensor has as many bytes as its dtype and shape need.

    Any number may be right for a dtype that is not read here.
    """
    if min(entry.shape, default=0) < 0:
        return False

    dtype = DTYPES.get(entry.dtype)
    return dtype is None or entry.num_bytes == math.prod(entry.shape) * dtype.itemsize
