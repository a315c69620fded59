"""Tensors of checkpoints as numpy arrays: a model folder's files one tensor at a time, and the
format safetensors.

numpy has no bfloat16: an array of uint16 is the bits of such numbers. Pickled weights can run code
when they are read, so they are refused unless the caller allows them. A fault of a folder is one
line with the file, the tensor and the cause.
"""

import json
import logging
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from handlers.base.pickles import pickled_files, refusal
from handlers.lmi_dist.arrays import BFLOAT16, Array
from handlers.lmi_dist.config_file import check_extra
from handlers.lmi_dist.gguf.tensors import GgufTensors, gguf_file
from lmi.errors import ModelUnusable, cause_line
from lmi.executor import Progress
from lmi.shared.model_files import read_bounded

NAMES = {np.dtype(np.float32): "float32", BFLOAT16: "bfloat16", np.dtype(np.float16): "float16"}
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
_INDEX = "model.safetensors.index.json"
# What older libraries saved beside the weights though it follows from config.json (angles of
# rotations, masks of attention), and what a trainer left there. All else that a program does not
# use is told.
_LEFTOVERS = re.compile(
    r"(.*\.)?(rotary_emb\.\w+|attn\.(masked_)?bias|attention\.(masked_)?bias)|(optimizer|exp_avg|exp_avg_sq)\..*"
)
# A warning names so many tensors.
_MAX_NAMED = 3
# So many rows of two tables are compared at a time.
_ROWS_AT_A_TIME = 1024

log = logging.getLogger(__name__)


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


def _rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """The numbers of an array in another dtype, each the nearest one, of two the even one."""
    numbers = as_float32(array)
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):
            return numbers.astype(dtype)

    bits = numbers.view(np.uint32)
    last_bit = bits >> 16 & 1
    return ((bits + 0x7FFF + last_bit) >> 16).astype(BFLOAT16)


def are_equal(first: Array, second: Array) -> bool:
    """Whether they hold the same numbers, as far as the coarser of their dtypes tells."""
    return _rounds_to(first, second) or _rounds_to(second, first)


def _rounds_to(array: Array, coarser: Array) -> bool:
    rounded = _rounded(array, coarser.dtype)
    return np.array_equal(as_float32(rounded), as_float32(coarser))


def are_same_rows(first: Array, second: Array) -> bool:
    """Whether two tables, (num_rows, width), are equal. It needs memory for a few rows."""
    if first.shape != second.shape:
        return False

    for start in range(0, len(first), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        if not are_equal(first[rows], second[rows]):
            return False

    return True


def tell_unused(place: object, names: Iterable[str]) -> None:
    """Warn of the tensors `names` in the files of `place`, which the model has no use for.

    Leftovers are not told.
    """
    unused = sorted(name for name in names if not _LEFTOVERS.fullmatch(name))
    if not unused:
        return

    tensors = f"{len(unused)} tensors of its weight files are"
    pronoun = "them"
    if len(unused) == 1:
        tensors = "1 tensor of its weight files is"
        pronoun = "it"

    first_names = ", ".join(unused[:_MAX_NAMED])
    if len(unused) > _MAX_NAMED:
        first_names += ", …"

    log.warning(
        "%s: %s not used, config.json has no place for %s: %s",
        place,
        tensors,
        pronoun,
        first_names,
    )


class Checkpoint:
    """The tensors of a folder by name.

    Files are mapped, so only tensors that are read cost memory.
    """

    def __init__(
        self, path: str, *, allow_pickle: bool = False, progress: Progress | None = None
    ) -> None:
        self._progress = progress or (lambda stage, share: None)
        self._taken: set[str] = set()
        self._has_said_float64 = False
        self.folder = Path(path)
        self._tables = _tables(self.folder, allow_pickle)

        # The file of each tensor.
        self.files: dict[str, Path] = {}
        for file, table in self._tables.items():
            for name in table:
                self.files[name] = file

    def take(self, name: str, shape: Iterable[int]) -> Array:
        """Read the tensor `name`, which must have this shape and a dtype of NAMES, and count it as
        taken.

        float64 becomes float32. Raises ModelUnusable.
        """
        file = self.files.get(name)
        if file is None:
            raise ModelUnusable(f"{self.folder}: tensor {name} is missing from its weight files")

        array = self.read(name)
        if array.shape != tuple(shape):
            raise ModelUnusable(
                f"{file}: tensor {name} has shape {array.shape}, config.json needs {tuple(shape)}"
            )

        self._taken.add(name)
        self._progress("weights", min(1.0, len(self._taken) / len(self.files)))
        if array.dtype == np.float64:
            return self._narrowed(array)

        if not is_float(array):
            names = ", ".join(NAMES.values())
            raise ModelUnusable(
                f"{file}: tensor {name} is {array.dtype.name}, weights must be {names} or float64"
            )

        return array

    def rest(self) -> None:
        """Let go of the pages of mapped files that were read.

        What is read again comes from the page cache.
        """
        for table in self._tables.values():
            if isinstance(table, SafetensorsFile | GgufTensors):
                table.rest()

    def _narrowed(self, array: Array) -> Array:
        if not self._has_said_float64:
            self._has_said_float64 = True
            log.info("%s: weights in float64 are rounded to float32", self.folder)

        with np.errstate(over="ignore"):
            return array.astype(np.float32)

    def unused(self) -> set[str]:
        """The tensors that nobody has taken."""
        return self.files.keys() - self._taken

    def read(self, name: str) -> Array:
        """Read a tensor that is there, in the shape and dtype of its file."""
        file = self.files[name]
        try:
            return self._tables[file][name]
        except ValueError as error:
            raise ModelUnusable(
                f"{file}: tensor {name} cannot be read: {cause_line(error)}"
            ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the index of a folder names, or all of them if there
    is no index.
    """
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnusable(f"{index}: no weight_map in it")

    return [existing_file(folder, str(name)) for name in sorted(set(weight_map.values()))]


def _tables(folder: Path, allow_pickle: bool) -> dict[Path, Mapping[str, Array]]:
    read_file: Callable[[Path], Mapping[str, Array]] = SafetensorsFile
    files = _weight_files(folder)
    fault = "not a whole safetensors file"
    if not files:
        gguf = gguf_file(folder)
        if gguf is not None:
            return {gguf: GgufTensors(gguf)}

        files = pickled_files(folder)
        if not files:
            raise ModelUnusable(f"{folder}: no model.safetensors in it")

        read_file = _pickle_reader(files[0], allow_pickle)
        fault = "cannot be read"

    tables = dict[Path, Mapping[str, Array]]()
    for file in files:
        try:
            tables[file] = read_file(file)
        except Exception as error:
            # Unpickling can raise any error.
            raise ModelUnusable(f"{file}: {fault}: {cause_line(error)}") from error

    return tables


def stored_dtype(path: str) -> np.dtype[Any]:
    """The dtype of most numbers in a folder's safetensors files, by their headers, or float32 where
    there are none. Of a GGUF file it is what its numbers become.
    """
    folder = Path(path)
    files = _weight_files(folder)
    if not files:
        gguf = gguf_file(folder)
        if gguf is not None:
            return GgufTensors(gguf).dtype_of_most()

    sizes = Counter[np.dtype[Any]]()
    for file in files:
        try:
            sizes.update(SafetensorsFile(file).sizes())
        except (ValueError, OSError):
            # Its load says what is wrong with it.
            continue

    return max(sizes, key=lambda dtype: sizes[dtype], default=np.dtype(np.float32))


def open_tensors(file: Path, pickled: Path, allow_pickle: bool) -> Mapping[str, Array]:
    """The tensors of a safetensors file, or of a pickled one where there is only that."""
    if file.is_file() or not pickled.is_file():
        return SafetensorsFile(file)

    return _pickle_reader(pickled, allow_pickle)(pickled)


def _pickle_reader(file: Path, is_allowed: bool) -> Callable[[Path], dict[str, Array]]:
    """What reads `file` and others. Raises SecurityRefused, or ModelUnusable without torch."""
    if not is_allowed:
        raise refusal(file)

    check_extra(file, "torch reads pickled weights")
    from handlers.lmi_dist.placement import load_pickled

    return load_pickled


class TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor; `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile(Mapping[str, Array]):
    """The tensors of a file by name, read-only arrays of its mapped bytes. Raises ValueError for a
    broken file.

    The file is 8 bytes with the size of a header, the header, then the tensors' bytes. The header
    is JSON: for each tensor its dtype, shape, and where its bytes begin and end. Source: Hugging
    Face's description of the format.
    """

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

        dtype = DTYPES[entry.dtype]
        num_elements = math.prod(entry.shape)
        start = self._start + entry.data_offsets[0]
        array: Array = np.frombuffer(self._data, dtype, num_elements, start)
        if not array.flags.aligned:
            array = array.copy()

        return array.reshape(entry.shape)

    def sizes(self) -> Counter[np.dtype[Any]]:
        """How many bytes the tensors of each dtype have."""
        sizes = Counter[np.dtype[Any]]()
        for entry in self._entries.values():
            if entry.dtype in DTYPES:
                start, end = entry.data_offsets
                sizes[DTYPES[entry.dtype]] += end - start

        return sizes

    def rest(self) -> None:
        # There are file systems that know no advice.
        with suppress(OSError):
            self._data.madvise(mmap.MADV_DONTNEED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _entries(header: bytes) -> dict[str, TensorEntry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(text, type=TensorEntry) for name, text in raw.items()}
    except msgspec.DecodeError as error:
        raise ValueError(f"its header is wrong: {error}") from error


def _check(name: str, entry: TensorEntry, num_bytes: int) -> None:
    start, end = entry.data_offsets
    if not 0 <= start <= end <= num_bytes:
        raise ValueError(f"tensor {name} lies in bytes {start} to {end} of {num_bytes}")

    # The size of a dtype that is not read here is not known.
    expected_bytes = end - start
    dtype = DTYPES.get(entry.dtype)
    if dtype is not None:
        expected_bytes = math.prod(entry.shape) * dtype.itemsize

    if min(entry.shape, default=0) < 0 or expected_bytes != end - start:
        raise ValueError(
            f"tensor {name} has {end - start} bytes, which are not {entry.dtype} of {entry.shape}"
        )


def existing_file(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise ModelUnusable(f"{folder}: the model folder does not exist")

    file = folder / name
    if not file.is_file():
        if not any(folder.iterdir()):
            raise ModelUnusable(f"{folder}: the model folder is empty")

        raise ModelUnusable(f"{file}: missing")

    return file


def read_json(file: Path, kind: type = dict) -> Any:
    """Read an object, or an array if the kind is list. Raises ModelUnusable."""
    try:
        content = json.loads(read_bounded(file))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelUnusable(f"{file}: not JSON: {cause_line(error)}") from error

    if not isinstance(content, kind):
        raise ModelUnusable(f"{file}: not a JSON {'object' if kind is dict else 'array'}")

    return content
