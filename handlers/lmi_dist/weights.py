"""A model folder on disk: its configuration and its tensors, one at a time.

The format is that of Hugging Face: config.json, model.safetensors (or shards with an index).
A fault of a folder is reported in one line that names the file, the tensor and the cause. Pickled weights can run code
when they are read, so they are refused unless the caller allows them. This module knows nothing of layers or devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from handlers.base.pickled import pickled_files, refusal
from handlers.lmi_dist.families import Architecture, describe
from handlers.lmi_dist.model_types import check_config, class_name, unsupported
from handlers.lmi_dist.rotary import stable_context_length
from lmi.errors import ModelUnusable, cause_line
from lmi.executor import Progress

_HEAD, _EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "embed_in.weight", "wte.weight")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts in the configuration of a folder, read once, before the weights."""

    path: str
    config: PretrainedConfig  # with every default filled in and old names replaced by new ones
    architecture: Architecture | None  # None: only the modules of transformers can run it
    vocab_size: int
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """The name of the model's class in transformers."""
        return _class_name(self.config)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the checkpoint, or None if its configuration has none."""
        return getattr(self.config, "dtype", None)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """The bytes of cache that one token needs over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_facts(path: str) -> ModelFacts:
    config = _read_config(path)
    for name in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(value := getattr(config, name, None), int) or value < 1:
            raise unsupported(path, f"{_class_name(config)} has no {name}: it does not run on attention alone")
    architecture = describe(config)
    num_heads = config.num_attention_heads
    return ModelFacts(
        path=path,
        config=config,
        architecture=architecture,
        vocab_size=config.vocab_size,
        context_length=architecture.context_length if architecture else stable_context_length(config),
        num_layers=config.num_hidden_layers,
        num_kv_heads=1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", num_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )


def _read_config(path: str) -> PretrainedConfig:
    file = _existing(Path(path), "config.json")
    raw = _read_json(file)
    if not raw.get("architectures"):
        raise ModelUnusable(f"{file}: no architectures, so this is not the configuration of a language model")
    check_config(file, raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises a different type for each way a file can be wrong
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error
    return config


def _class_name(config: PretrainedConfig) -> str:
    return class_name(config.architectures)


class Checkpoint:
    """The tensors of a folder by name. Files are mapped, so only tensors that are read cost memory."""

    def __init__(self, path: str, *, allow_pickle: bool = False, progress: Progress | None = None) -> None:
        self._progress = progress or (lambda stage, share: None)
        self._num_taken = 0
        self._readers: dict[Path, Any] = {}
        self._pickled: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}  # tensor name -> file
        self.folder = Path(path)
        files = _weight_files(self.folder)
        if files:
            for file in files:
                self._readers[file] = _open(file)
                self._files |= dict.fromkeys(self._readers[file].keys(), file)
        else:
            self._load_pickled(allow_pickle)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def take(self, name: str, shape: Iterable[int]) -> Tensor:
        """Read the tensor `name`, whose shape must be `shape`. Raises ModelUnusable.

        Take each tensor once.
        """
        file = self._files.get(name)
        if file is None:
            raise ModelUnusable(f"{self.folder}: tensor {name} is missing from its weight files")
        tensor = self.read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ModelUnusable(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}, config.json needs {tuple(shape)}"
            )
        self._num_taken += 1
        self._progress("weights", min(1.0, self._num_taken / len(self._files)))
        return tensor

    def read(self, name: str) -> Tensor:
        """Read a tensor that is there, in the shape and dtype of its file."""
        file = self._files[name]
        if name in self._pickled:
            return self._pickled[name]
        try:
            tensor: Tensor = self._readers[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelUnusable(f"{file}: tensor {name} cannot be read: {cause_line(error)}") from error
        return tensor

    def _load_pickled(self, allow_pickle: bool) -> None:
        files = pickled_files(self.folder)
        if not files:
            raise ModelUnusable(f"{self.folder}: no model.safetensors in it")
        if not allow_pickle:
            raise refusal(files[0])
        for file in files:
            try:
                tensors = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # unpickling can raise any error
                raise ModelUnusable(f"{file}: cannot be read: {cause_line(error)}") from error
            if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
                raise ModelUnusable(f"{file}: holds something else than a table of tensors")
            self._pickled |= tensors
            self._files |= dict.fromkeys(tensors, file)


def own_tensors(facts: ModelFacts, *, allow_pickle: bool) -> Callable[[str], Tensor | None]:
    """What reads tensors of a model by their names in transformers. Each call opens the model's files."""

    def own(name: str) -> Tensor | None:
        checkpoint = Checkpoint(facts.path, allow_pickle=allow_pickle)
        names = [name, name.partition(".")[2]]  # a checkpoint of the model without its head lacks the first word
        if facts.config.tie_word_embeddings and name == _HEAD:
            names += [one for one in checkpoint.names if one.endswith(_EMBEDDINGS)]
        return next((checkpoint.read(one) for one in names if one in checkpoint), None)

    return own


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the index of a folder names, or all of them if there is no index."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnusable(f"{index}: no weight_map in it")
    return [_existing(folder, str(name)) for name in sorted(set(weight_map.values()))]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelUnusable(f"{file}: not a whole safetensors file: {cause_line(error)}") from error


def _existing(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise ModelUnusable(f"{folder}: the model folder does not exist")
    file = folder / name
    if not file.is_file():
        is_empty = not any(folder.iterdir())
        raise ModelUnusable(f"{folder}: the model folder is empty" if is_empty else f"{file}: missing")
    return file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelUnusable(f"{file}: not JSON: {cause_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{file}: not a JSON object")
    return content
