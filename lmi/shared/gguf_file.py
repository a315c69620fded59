"""Reads the head of a GGUF file: its metadata, and where each tensor lies.

A file consists of a magic word, a version, the numbers of tensors and of metadata pairs, the pairs,
the descriptions of the tensors, and the data of the tensors, which is not read here. The data
begins at the next multiple of the alignment. A model may be split into files
`NAME-00001-of-00003.gguf`, of which the first has the metadata. Source: the page `docs/gguf.md` of
ggml.

The file is a stranger's. So every number is compared with the bytes that are there before it is
used, and each fault is one line that names the file and what is wrong with it.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from enum import IntEnum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from lmi.errors import ModelUnusable, shorten

MAGIC = b"GGUF"
# The two have the same layout.
VERSIONS = (2, 3)
SUFFIX = ".gguf"
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32

# The most files of one model.
MAX_FILES = 1024
MAX_PAIRS = 65_536
MAX_TENSORS = 65_536
# The most dimensions and elements of one tensor.
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 40
MAX_NAME_BYTES = 65_535
MAX_TEXT_BYTES = 64 << 20
MAX_METADATA_BYTES = 256 << 20
# The most items of all arrays of a file together.
MAX_ITEMS = 8 << 20
MAX_ALIGNMENT = 1 << 16

Metadata = Mapping[str, Any]
"""Values by key: whole numbers, floats, bools, texts, and lists of one of these."""


class ValueKind(IntEnum):
    """The kinds of values in metadata, by the numbers that files have for them."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    TEXT = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# How `struct` reads a value of a kind, or an item of an array.
FORMATS = {
    ValueKind.UINT8: "B",
    ValueKind.INT8: "b",
    ValueKind.UINT16: "H",
    ValueKind.INT16: "h",
    ValueKind.UINT32: "I",
    ValueKind.INT32: "i",
    ValueKind.FLOAT32: "f",
    ValueKind.BOOL: "B",
    ValueKind.UINT64: "Q",
    ValueKind.INT64: "q",
    ValueKind.FLOAT64: "d",
}
# The number of bytes that stands before each text.
TEXT_LENGTH = struct.Struct("<Q")


class TensorType(NamedTuple):
    """How numbers are stored: in blocks of `num_bytes`, each with `num_elements` of a row."""

    name: str
    num_elements: int
    num_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    30: TensorType("BF16", 1, 2),
}
"""The types that can be read, by the numbers that files have for them."""

OTHER_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
"""The names of types that are refused."""


class _Description(NamedTuple):
    """What the head of a file says of a tensor."""

    name: str
    type: TensorType
    # As in numpy: the dimension that changes fastest in the file is the last one.
    shape: tuple[int, ...]
    # The first byte, counted from the beginning of the data.
    offset: int
    num_bytes: int


class StoredTensor(Struct, frozen=True):
    """Where a tensor lies."""

    file: Path
    name: str
    type: TensorType
    # As in numpy: the dimension that changes fastest in the file is the last one.
    shape: tuple[int, ...]
    # The first byte, counted from the beginning of the file.
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first byte behind it, counted from the beginning of the file."""
        return self.start + self.num_bytes


class GgufModel(Struct, frozen=True):
    """A model in one file, or in several: the metadata of the first, and all tensors by name."""

    files: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    @property
    def num_numbers(self) -> int:
        """The elements of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_model(path: Path) -> GgufModel:
    """Read the model of a file: that file, or all files if the model is split.

    Raises ModelUnusable with one line for a file that is missing or broken.
    """
    files = files_of(path)
    parts = [_read_file(file) for file in files]
    metadata = parts[0].metadata
    if metadata.get("split.count", 1) not in (0, len(files)):
        raise ModelUnusable(
            f"{files[0]}: split.count is {shorten(metadata['split.count'])}, its name says "
            f"{len(files)} files"
        )

    if len(files) == 1:
        return parts[0]

    tensors = _joined(parts)
    num_tensors = metadata.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors):
        raise ModelUnusable(
            f"{files[0]}: split.tensors.count is {shorten(num_tensors)}, the files have "
            f"{len(tensors)}"
        )

    return GgufModel(tuple(files), metadata, tensors)


def _joined(parts: list[GgufModel]) -> dict[str, StoredTensor]:
    """Return the tensors of all files of a split model. Raises ModelUnusable if a file has not the
    number that it should have, or if two files have a tensor of one name.
    """
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number:
            value = shorten(part.metadata.get("split.no"))
            raise ModelUnusable(f"{part.files[0]}: split.no must be {number}, given {value}")

        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelUnusable(f"{tensor.file}: tensor {name} is in {tensors[name].file} too")

            tensors[name] = tensor

    return tensors


def files_of(path: Path) -> list[Path]:
    """Return the files of a model, of which `path` is one, in their order.

    Raises ModelUnusable if one of them is missing.
    """
    files = parts_of(path)
    for file in files:
        if not file.is_file():
            raise ModelUnusable(f"{file}: {'is no file' if file.exists() else 'is missing'}")

    return files


def first_part(path: Path) -> Path:
    """Return the first file of a split model, or the file itself if its model is not split."""
    split_name = SPLIT_NAME.fullmatch(path.name)
    if split_name is None:
        return path

    return path.with_name(f"{split_name['stem']}-00001-of-{split_name['count']}{SUFFIX}")


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model in their order, as the name of one of them says. They need not be
    there. Raises ModelUnusable for a name with numbers that no split file has.
    """
    split_name = SPLIT_NAME.fullmatch(path.name)
    if split_name is None:
        return [path]

    count = int(split_name["count"])
    if not 1 <= int(split_name["number"]) <= count <= MAX_FILES:
        raise ModelUnusable(
            f"{path}: the name of a split file counts from 00001 to at most {MAX_FILES}"
        )

    files = []
    for number in range(1, count + 1):
        name = f"{split_name['stem']}-{number:05}-of-{count:05}{SUFFIX}"
        files.append(path.with_name(name))

    return files


def _read_file(path: Path) -> GgufModel:
    """Read one file as a model of its own. Raises ModelUnusable."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ValueError("is empty")

            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        with data:
            return _HeadReader(path, data).model()
    except (ValueError, OSError) as error:
        raise ModelUnusable(f"{path}: {error}") from error


class _HeadReader:
    """Reads the head of a mapped file from its beginning to its end.

    Every method raises ValueError for what is broken, or cannot be read here.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        # The place of the next byte that is read.
        self._offset = 0
        # The items of all arrays so far.
        self._num_items = 0

    def model(self) -> GgufModel:
        """Read the whole head."""
        num_tensors, num_pairs = self._start()
        metadata = self._metadata(num_pairs)
        alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if not _is_alignment(alignment):
            raise ValueError(
                f"{ALIGNMENT} must be a power of two from 8 to {MAX_ALIGNMENT}, given "
                f"{shorten(alignment)}"
            )

        descriptions = [self._description(alignment) for _ in range(num_tensors)]
        # The data begins at the next multiple of the alignment.
        first_byte = -(-self._offset // alignment) * alignment
        tensors = self._placed(descriptions, first_byte)
        return GgufModel((self._path,), metadata, tensors)

    def _start(self) -> tuple[int, int]:
        """Return how many tensors and pairs the file has."""
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError("is not a GGUF file: it does not begin with GGUF")

        version = self._number(ValueKind.UINT32)
        if version & 0xFFFF == 0:
            raise ValueError("is a big-endian GGUF file, only little-endian ones are read")

        if version not in VERSIONS:
            raise ValueError(f"is GGUF of version {version}, only 2 and 3 are read")

        num_tensors = self._number(ValueKind.UINT64)
        num_pairs = self._number(ValueKind.UINT64)
        if num_tensors > MAX_TENSORS:
            raise ValueError(f"names {num_tensors} tensors, at most {MAX_TENSORS} are read")

        if num_pairs > MAX_PAIRS:
            raise ValueError(f"names {num_pairs} pairs of metadata, at most {MAX_PAIRS} are read")

        return num_tensors, num_pairs

    def _metadata(self, num_pairs: int) -> dict[str, Any]:
        """Read the pairs, and return their values by key."""
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text(MAX_NAME_BYTES)
            if key in metadata:
                raise ValueError(f"its metadata has {shorten(key)} twice")

            kind = self._kind(key)
            if kind is ValueKind.ARRAY:
                metadata[key] = self._array(key)
            else:
                metadata[key] = self._value(key, kind)

            if self._offset > MAX_METADATA_BYTES:
                raise ValueError(f"its metadata is over {MAX_METADATA_BYTES} bytes")

        return metadata

    def _kind(self, key: str) -> ValueKind:
        """Read the kind of the value, or of the items of the array, that a key has."""
        number = self._number(ValueKind.UINT32)
        try:
            return ValueKind(number)
        except ValueError:
            raise ValueError(f"{shorten(key)} has a value of the unknown kind {number}") from None

    def _array(self, key: str) -> list[Any]:
        """Read the items of an array, which are of one kind."""
        kind = self._kind(key)
        if kind is ValueKind.ARRAY:
            raise ValueError(f"{shorten(key)} is an array of arrays")

        length = self._number(ValueKind.UINT64)
        self._num_items += length
        if self._num_items > MAX_ITEMS:
            raise ValueError(
                f"its arrays have over {MAX_ITEMS} items, at {shorten(key)} with {length}"
            )

        if kind is ValueKind.TEXT:
            return self._texts(length)

        form = FORMATS[kind]
        data = self._take(length * struct.calcsize(form))
        values = list(struct.unpack(f"<{length}{form}", data))
        if kind is ValueKind.BOOL:
            return [self._bool(key, value) for value in values]

        return values

    def _value(self, key: str, kind: ValueKind) -> Any:
        """Read a value that is no array."""
        if kind is ValueKind.TEXT:
            return self._text(MAX_TEXT_BYTES)

        number = self._number(kind)
        if kind is ValueKind.BOOL:
            return self._bool(key, number)

        return number

    def _bool(self, key: str, byte: int) -> bool:
        """Return whether a byte that stands for a bool is 1. Any but 0 and 1 is a fault."""
        if byte not in (0, 1):
            raise ValueError(f"{shorten(key)} must be true or false, given the byte {byte}")

        return byte == 1

    def _description(self, alignment: int) -> _Description:
        """Read the description of a tensor."""
        name = self._text(MAX_NAME_BYTES)
        num_dimensions = self._number(ValueKind.UINT32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {shorten(name)} has {num_dimensions} dimensions, allowed are 1 to "
                f"{MAX_DIMENSIONS}"
            )

        sizes = [self._number(ValueKind.UINT64) for _ in range(num_dimensions)]
        shape = tuple(reversed(sizes))
        if min(shape) < 1 or prod(shape) > MAX_ELEMENTS:
            raise ValueError(
                f"tensor {shorten(name)} has the shape {shape}, allowed are 1 to {MAX_ELEMENTS} "
                f"numbers"
            )

        type = self._type_of(name, self._number(ValueKind.UINT32))
        num_blocks, remainder = divmod(shape[-1], type.num_elements)
        if remainder:
            raise ValueError(
                f"tensor {shorten(name)} has rows of {shape[-1]} numbers, {type.name} needs a "
                f"multiple of {type.num_elements}"
            )

        num_rows = prod(shape[:-1])
        num_bytes = num_rows * num_blocks * type.num_bytes
        offset = self._number(ValueKind.UINT64)
        if offset % alignment:
            raise ValueError(
                f"tensor {shorten(name)} begins at byte {offset} of the data, which is no multiple "
                f"of {alignment}"
            )

        return _Description(name, type, shape, offset, num_bytes)

    def _type_of(self, name: str, number: int) -> TensorType:
        """Return the type that a file names by a number, for the tensor of this name."""
        if number in TENSOR_TYPES:
            return TENSOR_TYPES[number]

        type_name = OTHER_TYPES.get(number, f"the unknown type {number}")
        readable = ", ".join(type.name for type in TENSOR_TYPES.values())
        raise ValueError(
            f"tensor {shorten(name)} is {type_name}, which is not read, only {readable}"
        )

    def _placed(self, descriptions: list[_Description], first_byte: int) -> dict[str, StoredTensor]:
        """Return the tensors by name, in a file whose data begins at `first_byte`."""
        tensors: dict[str, StoredTensor] = {}
        for description in descriptions:
            name = description.name
            if name in tensors:
                raise ValueError(f"it has tensor {shorten(name)} twice")

            start = first_byte + description.offset
            tensor = StoredTensor(
                file=self._path,
                name=name,
                type=description.type,
                shape=description.shape,
                start=start,
                num_bytes=description.num_bytes,
            )
            if tensor.end > len(self._data):
                raise ValueError(
                    f"tensor {shorten(name)} lies in bytes {start} to {tensor.end}, the file has "
                    f"{len(self._data)}: it is cut short or damaged"
                )

            tensors[name] = tensor

        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for former, latter in pairwise(in_order):
            if latter.start < former.end:
                raise ValueError(
                    f"tensors {shorten(former.name)} and {shorten(latter.name)} overlap"
                )

        return tensors

    def _number(self, kind: ValueKind) -> Any:
        """Read a number. A bool is its byte."""
        form = f"<{FORMATS[kind]}"
        data = self._take(struct.calcsize(form))
        return struct.unpack(form, data)[0]

    def _text(self, max_bytes: int) -> str:
        """Read a text, which its length in bytes precedes."""
        length = self._number(ValueKind.UINT64)
        if length > max_bytes:
            raise ValueError(
                f"a text of {length} bytes at byte {self._offset}, at most {max_bytes} are read"
            )

        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the text before byte {self._offset} is not UTF-8") from None

    def _texts(self, count: int) -> list[str]:
        """Read texts that lie one behind the other.

        A vocabulary has hundreds of thousands of them. So a sound text is read here, and only for a
        broken one `_text` is called, which says what is wrong with it.
        """
        data = self._data
        num_bytes = len(data)
        texts: list[str] = []
        for _ in range(count):
            try:
                [length] = TEXT_LENGTH.unpack_from(data, self._offset)
                start = self._offset + TEXT_LENGTH.size
                end = start + length
                if length > MAX_TEXT_BYTES or end > num_bytes:
                    raise ValueError

                text = data[start:end].decode()
            except (struct.error, ValueError):
                texts.append(self._text(MAX_TEXT_BYTES))
            else:
                texts.append(text)
                self._offset = end

        return texts

    def _take(self, length: int) -> bytes:
        """Read so many bytes."""
        if length > len(self._data) - self._offset:
            raise ValueError(f"it ends within its head, at byte {len(self._data)}")

        data = self._data[self._offset : self._offset + length]
        self._offset += length
        return data


def _is_alignment(value: object) -> bool:
    """Return whether a value of the metadata is a power of two that an alignment may be."""
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT:
        return False

    return value & (value - 1) == 0
