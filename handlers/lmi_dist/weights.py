"""The weights of a model folder as arrays of numpy, one tensor at a time.

They lie in safetensors files, in a GGUF file, or in pickled files. These can run code when they are
read, so they are refused unless the caller allows them. A weight that is quantised by config.json
is made of several tensors, and has the name that it has in transformers. A fault of a folder is one
line with the file, the tensor and the cause.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from handlers.base.pickles import pickled_files, refusal
from handlers.lmi_dist.arrays import FLOAT_NAMES, Array, is_float
from handlers.lmi_dist.config_file import check_extra
from handlers.lmi_dist.folder_files import existing_file, read_json
from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.gguf.tensors import GgufTensors, gguf_file
from handlers.lmi_dist.quantised.blocks import blocks_of, type_of
from handlers.lmi_dist.quantised.scheme import Scheme, read_scheme, refused
from handlers.lmi_dist.quantised.tensors import QuantisedTensors
from handlers.lmi_dist.safetensors_file import SafetensorsFile
from lmi.errors import ModelUnusable, cause_line
from lmi.executor import Progress
from lmi.shared.gguf_file import TensorType

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

log = logging.getLogger(__name__)


class Checkpoint:
    """The tensors of a folder by name.

    Files are mapped, so only tensors that are read cost memory.
    """

    def __init__(
        self, path: str, *, allow_pickle: bool = False, progress: Progress | None = None
    ) -> None:
        """Open the weight files of a folder; `progress` hears which share of the tensors was taken.

        Raises ModelUnusable, or SecurityRefused for pickled files that are not allowed.
        """
        self._progress = progress or (lambda stage, share: None)
        self._taken: set[str] = set()
        self._has_told_of_float64 = False
        self.folder = Path(path)
        self._tables = _tables(self.folder, allow_pickle)

        # By tensor, and by quantised weight: the file that has it, or a part of it.
        self.files: dict[str, Path] = {}
        for file, table in self._tables.items():
            for name in table:
                self.files[name] = file

        self._stored_names = frozenset(self.files)
        scheme = quantisation_of(self.folder)
        self.quantised = QuantisedTensors(scheme, self._stored_names, self._read_stored)
        for name in self.quantised:
            first_part = min(self.quantised.parts_of(name))
            self.files[name] = self.files[first_part]

    def take(self, name: str, shape: Iterable[int]) -> Array:
        """Read a tensor of this shape, in one of the floats of FLOAT_NAMES, and count it as taken.

        float64 becomes float32. Raises ModelUnusable.
        """
        file = self._file_of(name)
        array = self.read(name)
        self._count_taken(name, array.shape, tuple(shape))
        if array.dtype == np.float64:
            return self._narrowed(array)

        if not is_float(array):
            names = ", ".join(FLOAT_NAMES.values())
            raise ModelUnusable(
                f"{file}: tensor {name} is {array.dtype.name}, weights must be {names} or float64"
            )

        return array

    def take_blocks(self, name: str, shape: tuple[int, int]) -> BlockRows | None:
        """Return a weight (num_out, num_in) of this shape in blocks, and count it as taken.

        Returns None for a weight that is stored otherwise. Those of a GGUF file and quantised ones
        may be in blocks. Raises ModelUnusable.
        """
        table = self._tables[self._file_of(name)]
        blocks: BlockRows | None = None
        with self._naming(name):
            if name in self.quantised:
                blocks = blocks_of(self.quantised[name])
            elif isinstance(table, GgufTensors):
                blocks = table.blocks_of(name)

        if blocks is not None:
            self._count_taken(name, blocks.shape, shape)

        return blocks

    def read(self, name: str) -> Array:
        """Read a tensor that is there, in the shape and dtype of its file.

        A quantised weight is (num_out, num_in), float32. Raises ModelUnusable.
        """
        with self._naming(name):
            if name in self.quantised:
                return self.quantised[name].floats()

            return self._read_stored(name)

    def types_of_blocks(self) -> dict[str, TensorType | None]:
        """Return the type of the blocks that hold each quantised weight, or None for one that only
        floats hold. Raises ModelUnusable.
        """
        types: dict[str, TensorType | None] = {}
        for name in self.quantised:
            with self._naming(name):
                types[name] = type_of(self.quantised[name])

        return types

    def _read_stored(self, name: str) -> Array:
        return self._tables[self.files[name]][name]

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Raise ModelUnusable with the name of a tensor, and its file, if it cannot be read."""
        try:
            yield
        except ValueError as error:
            raise ModelUnusable(
                f"{self.files[name]}: tensor {name} cannot be read: {cause_line(error)}"
            ) from error

    def _file_of(self, name: str) -> Path:
        """Return the file of a tensor. Raises ModelUnusable if there is none."""
        file = self.files.get(name)
        if file is None:
            raise ModelUnusable(f"{self.folder}: tensor {name} is missing from its weight files")

        return file

    def _count_taken(self, name: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
        """Count a tensor as taken. Raises ModelUnusable unless it has the shape that is needed."""
        if shape != needed:
            raise ModelUnusable(
                f"{self.files[name]}: tensor {name} has shape {shape}, config.json needs {needed}"
            )

        self._taken.add(name)
        self._taken.update(self.quantised.parts_of(name))
        self._progress("weights", min(1.0, len(self._taken) / len(self.files)))

    def unused(self) -> set[str]:
        """Return the names of the tensors in the files that nobody has taken."""
        return set(self._stored_names - self._taken)

    def release_pages(self) -> None:
        """Let go of the pages of mapped files that were read.

        What is read again comes from the page cache.
        """
        for table in self._tables.values():
            if isinstance(table, SafetensorsFile | GgufTensors):
                table.release_pages()

    def _narrowed(self, array: Array) -> Array:
        """Return an array of float64 in float32, and log once that numbers are rounded."""
        if not self._has_told_of_float64:
            self._has_told_of_float64 = True
            log.info("%s: weights in float64 are rounded to float32", self.folder)

        with np.errstate(over="ignore"):
            return array.astype(np.float32)


def stored_dtype(path: str) -> np.dtype[Any]:
    """Return the dtype that most floats in a folder's safetensors files have, by their headers.

    In a folder with a GGUF file it is what its numbers become. Without any floats it is float32.
    """
    folder = Path(path)
    files = _safetensors_files(folder)
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

    floats = [dtype for dtype in sizes if dtype == np.float64 or dtype in FLOAT_NAMES]
    return max(floats, key=lambda dtype: sizes[dtype], default=np.dtype(np.float32))


def quantisation_of(folder: Path) -> Scheme | None:
    """Return how the weights in a folder's safetensors files are quantised, by its config.json, or
    None if they are not. Raises ModelUnusable.
    """
    file = folder / CONFIG
    if not file.is_file():
        return None

    scheme = read_scheme(file, read_json(file))
    if scheme is not None and not _safetensors_files(folder):
        raise refused(file, "weights in no safetensors file")

    return scheme


def quantised_types(path: str) -> dict[str, TensorType | None]:
    """Return the type of the blocks that hold each quantised weight of a folder, by its name, or
    None for one that only floats hold. Raises ModelUnusable.
    """
    if quantisation_of(Path(path)) is None:
        return {}

    return Checkpoint(path).types_of_blocks()


def stored_types(path: str) -> Counter[TensorType] | None:
    """Return how many numbers of each type the GGUF file of a folder has, or None if the weights
    are in no such file.
    """
    folder = Path(path)
    gguf = gguf_file(folder)
    if gguf is None or _safetensors_files(folder):
        return None

    return GgufTensors(gguf).sizes()


def open_tensors(file: Path, pickled_file: Path, allow_pickle: bool) -> Mapping[str, Array]:
    """Return the tensors of a safetensors file, or of a pickled one where there is only that.

    Raises what SafetensorsFile raises, what torch raises, and SecurityRefused for a pickled file
    that is not allowed.
    """
    if file.is_file() or not pickled_file.is_file():
        return SafetensorsFile(file)

    read_pickled = _pickle_reader(pickled_file, allow_pickle)
    return read_pickled(pickled_file)


def _tables(folder: Path, allow_pickle: bool) -> dict[Path, Mapping[str, Array]]:
    """Return the tensors of each weight file of a folder, by name."""
    files = _safetensors_files(folder)
    if files:
        return _read_all(files, SafetensorsFile, "not a whole safetensors file")

    gguf = gguf_file(folder)
    if gguf is not None:
        return {gguf: GgufTensors(gguf)}

    files = pickled_files(folder)
    if not files:
        raise ModelUnusable(f"{folder}: no model.safetensors in it")

    return _read_all(files, _pickle_reader(files[0], allow_pickle), "cannot be read")


def _safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files that the index of a folder names, or all of them if there is no
    index.
    """
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnusable(f"{index}: no weight_map in it")

    return [existing_file(folder, str(name)) for name in sorted(set(weight_map.values()))]


def _pickle_reader(file: Path, is_allowed: bool) -> Callable[[Path], dict[str, Array]]:
    """Return what reads a pickled file and others of its folder.

    Raises SecurityRefused, or ModelUnusable without torch.
    """
    if not is_allowed:
        raise refusal(file)

    check_extra(file, "torch reads pickled weights")
    from handlers.lmi_dist.placement import load_pickled

    return load_pickled


def _read_all(
    files: Iterable[Path], read_file: Callable[[Path], Mapping[str, Array]], fault: str
) -> dict[Path, Mapping[str, Array]]:
    """Return the tensors that `read_file` gives of each file.

    Raises ModelUnusable, which says `fault` of a file that cannot be read.
    """
    tables: dict[Path, Mapping[str, Array]] = {}
    for file in files:
        try:
            tables[file] = read_file(file)
        except Exception as error:
            # Unpickling can raise any error.
            raise ModelUnusable(f"{file}: {fault}: {cause_line(error)}") from error

    return tables
