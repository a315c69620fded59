"""The tensors of a model folder, one at a time: model.safetensors, or shards with an index.

A fault of a folder is reported in one line that names the file, the tensor and the cause. Pickled weights can run code
when they are read, so they are refused unless the caller allows them. This module knows nothing of layers or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from handlers.base.configuration import pickled_files, refusal
from handlers.lmi_dist.facts import ModelFacts, existing_file, read_json
from handlers.lmi_dist.model_types import check_extra
from handlers.lmi_dist.safetensors import Array, SafetensorsFile
from lmi.errors import ModelUnusable, cause_line
from lmi.executor import Progress

_HEAD, _EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "embed_in.weight", "wte.weight")
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a folder by name. Files are mapped, so only tensors that are read cost memory."""

    def __init__(self, path: str, *, allow_pickle: bool = False, progress: Progress | None = None) -> None:
        self._progress = progress or (lambda stage, share: None)
        self._num_taken = 0
        self.folder = Path(path)
        files = _weight_files(self.folder)
        self._tables = {file: _open(file) for file in files} if files else _pickled(self.folder, allow_pickle)
        self._files = {name: file for file, table in self._tables.items() for name in table}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def take(self, name: str, shape: Iterable[int]) -> Array:
        """Read the tensor `name`, whose shape must be `shape`. Raises ModelUnusable.

        Take each tensor once.
        """
        file = self._files.get(name)
        if file is None:
            raise ModelUnusable(f"{self.folder}: tensor {name} is missing from its weight files")
        array = self.read(name)
        if array.shape != tuple(shape):
            raise ModelUnusable(f"{file}: tensor {name} has shape {array.shape}, config.json needs {tuple(shape)}")
        self._num_taken += 1
        self._progress("weights", min(1.0, self._num_taken / len(self._files)))
        return array

    def read(self, name: str) -> Array:
        """Read a tensor that is there, in the shape and dtype of its file."""
        file = self._files[name]
        try:
            return self._tables[file][name]
        except ValueError as error:
            raise ModelUnusable(f"{file}: tensor {name} cannot be read: {cause_line(error)}") from error


def own_tensors(facts: ModelFacts, *, allow_pickle: bool) -> Callable[[str], Array | None]:
    """What reads tensors of a model by their names in transformers. Each call opens the model's files."""

    def own(name: str) -> Array | None:
        checkpoint = Checkpoint(facts.path, allow_pickle=allow_pickle)
        names = [name, name.partition(".")[2]]  # a checkpoint of the model without its head lacks the first word
        if facts.is_tied and name == _HEAD:
            names += [one for one in checkpoint.names if one.endswith(_EMBEDDINGS)]
        return next((checkpoint.read(one) for one in names if one in checkpoint), None)

    return own


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the index of a folder names, or all of them if there is no index."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnusable(f"{index}: no weight_map in it")
    return [existing_file(folder, str(name)) for name in sorted(set(weight_map.values()))]


def _open(file: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(file)
    except (ValueError, OSError) as error:
        raise ModelUnusable(f"{file}: not a whole safetensors file: {cause_line(error)}") from error


def _pickled(folder: Path, allow_pickle: bool) -> dict[Path, Mapping[str, Array]]:
    files = pickled_files(folder)
    if not files:
        raise ModelUnusable(f"{folder}: no model.safetensors in it")
    if not allow_pickle:
        raise refusal(files[0])
    check_extra(files[0], "torch reads pickled weights")
    from handlers.lmi_dist.placement import load_pickled

    tables: dict[Path, Mapping[str, Array]] = {}
    for file in files:
        try:
            tables[file] = load_pickled(file)
        except Exception as error:  # unpickling can raise any error
            raise ModelUnusable(f"{file}: cannot be read: {cause_line(error)}") from error
    return tables
