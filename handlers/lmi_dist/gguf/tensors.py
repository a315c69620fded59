"""The tensors of a GGUF model by the names of transformers, as transformers has them.

The converter renames tensors, and it changes some. What it has done is undone here:

- Llama: the rows of queries and keys are in another order, for rotations of neighbouring channels.
- Gemma: every norm has the 1 in it that transformers adds.
- GPT-2: linears are turned round.
- Phi-2: queries, keys and values are one linear.

Source: `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp.
"""

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.gguf.blocks import DEQUANTISE, dequantise
from lmi.errors import ModelUnusable
from lmi.shared.gguf_file import SUFFIX, GgufModel, StoredTensor, TensorType, read_model

Array: TypeAlias = npt.NDArray[Any]
Names: TypeAlias = Mapping[str, str]

# The bits of bfloat16 are in an array of uint16.
DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# The tensors that the model's configuration was made of. No layer reads them.
OF_CONFIGURATION = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)

_LLAMA: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}
_HEAD_NORMS: Names = {
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
_GEMMA2: Names = {
    **_LLAMA,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_PHI2: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.final_layernorm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_output": "model.layers.{}.self_attn.dense",
    "ffn_up": "model.layers.{}.mlp.fc1",
    "ffn_down": "model.layers.{}.mlp.fc2",
}
_PHI3: Names = {
    **_LLAMA,
    "attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
_GPT2: Names = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.ln_1",
    "attn_qkv": "transformer.h.{}.attn.c_attn",
    "attn_output": "transformer.h.{}.attn.c_proj",
    "ffn_norm": "transformer.h.{}.ln_2",
    "ffn_up": "transformer.h.{}.mlp.c_fc",
    "ffn_down": "transformer.h.{}.mlp.c_proj",
}
NAMES: Mapping[str, Names] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3": {**_GEMMA2, **_HEAD_NORMS},
    "phi2": _PHI2,
    "phi3": _PHI3,
    "gpt2": _GPT2,
}
"""Modules of transformers by parts of GGUF, without the number of the layer, of each family."""

QKV_OF_PHI2 = ("q_proj", "k_proj", "v_proj")
TURNED_IN_GPT2 = frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})


class _Tensor(Struct, frozen=True):
    """A tensor of transformers: the stored one that it is made of, and the function that makes it,
    if it is changed.
    """

    stored: StoredTensor
    undo: Callable[[Array], Array] | None = None


def gguf_file(folder: Path) -> Path | None:
    """Return the first GGUF file in a folder, or None if there is none."""
    return next(iter(sorted(folder.glob(f"*{SUFFIX}"))), None)


class GgufTensors(Mapping[str, Array]):
    """The tensors of a model in GGUF by the names of transformers.

    A tensor is read when it is asked for: of F32, F16 and BF16 it is a view of the mapped file, of
    any other type an array in float32. `blocks_of` gives the blocks of such a type as they are.
    """

    def __init__(self, path: Path) -> None:
        """Map the files of a model.

        Raises ModelUnusable for a file that is broken, or of a family that is not read here.
        """
        status = path.stat()
        head = _head_of(path, status.st_size, status.st_mtime_ns)
        self._data = {file: _mapped(file) for file in head.files}
        self._tensors = head.tensors

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[name]
        stored = tensor.stored
        data = self._bytes_of(stored)
        if stored.type.name in DEQUANTISE:
            numbers: Array = dequantise(data, stored.type)
        else:
            numbers = data.view(DTYPES[stored.type.name])

        array = numbers.reshape(stored.shape)
        return array if tensor.undo is None else tensor.undo(array)

    def blocks_of(self, name: str) -> BlockRows | None:
        """Return a weight (num_out, num_in) in its blocks, or None if it has none."""
        tensor = self._tensors[name]
        stored = tensor.stored
        if stored.type.name not in DEQUANTISE or len(stored.shape) != 2:
            return None

        rows = self._bytes_of(stored).reshape(stored.shape[0], -1)
        # The file has a weight that transformers turns round as the kernels want it.
        if tensor.undo is not None and tensor.undo is not np.transpose:
            rows = tensor.undo(rows)

        return BlockRows(stored.type, rows)

    def _bytes_of(self, stored: StoredTensor) -> Array:
        return np.frombuffer(self._data[stored.file], np.uint8, stored.num_bytes, stored.start)

    def sizes(self) -> Counter[TensorType]:
        """Return how many numbers the tensors of each type have."""
        sizes = Counter[TensorType]()
        for tensor in self._tensors.values():
            sizes[tensor.stored.type] += math.prod(tensor.stored.shape)

        return sizes

    def dtype_of_most(self) -> np.dtype[Any]:
        """Return the dtype in which most numbers are kept.

        For blocks it is float16: float32 is made of either, so nothing stays mapped.
        """
        sizes = Counter[str]()
        for kind, num_numbers in self.sizes().items():
            sizes[kind.name] += num_numbers

        [(most, _)] = sizes.most_common(1) or [("F32", 0)]
        dtype = DTYPES.get(most, np.float16)
        return np.dtype(dtype)

    def release_pages(self) -> None:
        """Let go of the pages that were read."""
        for data in self._data.values():
            # Some file systems take no advice.
            with suppress(OSError):
                data.madvise(mmap.MADV_DONTNEED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Head(NamedTuple):
    """What the head of a model's file says of its weights."""

    files: tuple[Path, ...]
    tensors: Mapping[str, _Tensor]


@lru_cache(maxsize=1)
def _head_of(path: Path, num_bytes: int, changed_ns: int) -> _Head:
    """Return what a file says of its weights, which a load asks three times.

    `num_bytes` and `changed_ns` tell a file from what replaces it. The vocabulary, most of a head
    and of the time that reading it takes, is not kept.
    """
    model = read_model(path)
    return _Head(tuple(model.files), _tensors(path, model))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _tensors(path: Path, model: GgufModel) -> dict[str, _Tensor]:
    """Return the tensors by the names of transformers. One without such a name keeps the name that
    it has in the file.
    """
    family = model.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in NAMES:
        raise ModelUnusable(f"{path}: general.architecture must be one of {', '.join(NAMES)}")

    tensors: dict[str, _Tensor] = {}
    for name, stored in model.tensors.items():
        if name in OF_CONFIGURATION:
            continue

        words = _NameParts.of(name)
        if family == "phi2" and words.part == "attn_qkv":
            attention = f"model.layers.{words.layer}.self_attn"
            for index, projection in enumerate(QKV_OF_PHI2):
                new_name = f"{attention}.{projection}.{words.kind}"
                tensors[new_name] = _Tensor(stored, _third(index))

            continue

        module = NAMES[family].get(words.part)
        new_name = name if module is None else f"{module.format(words.layer)}.{words.kind}"
        tensors[new_name] = _Tensor(stored, _undo(family, words, model))

    return tensors


class _NameParts(NamedTuple):
    """What the name of a tensor in a file says: of `blk.3.attn_q.weight` attn_q, 3 and weight."""

    part: str
    layer: str
    kind: str

    @classmethod
    def of(cls, name: str) -> "_NameParts":
        words = name.split(".")
        if len(words) == 4 and words[0] == "blk":
            return cls(part=words[2], layer=words[1], kind=words[3])

        part, _, kind = name.rpartition(".")
        return cls(part=part, layer="", kind=kind)


def _undo(family: str, words: _NameParts, model: GgufModel) -> Callable[[Array], Array] | None:
    """Return what undoes the converter's change of a tensor, or None if it has changed nothing."""
    part = words.part
    if family == "llama" and part in ("attn_q", "attn_k"):
        num_heads = model.metadata.get("llama.attention.head_count")
        if part == "attn_k":
            num_heads = model.metadata.get("llama.attention.head_count_kv", num_heads)

        return _unpermuted(num_heads)

    if family.startswith("gemma") and part.endswith("norm"):
        return _less_one

    if family == "gpt2" and part in TURNED_IN_GPT2 and words.kind == "weight":
        return np.transpose

    return None


def _unpermuted(num_heads: Any) -> Callable[[Array], Array]:
    """Return what puts the second half of each head's rows below the first, as in transformers.

    The converter has put row i of the second half behind row i of the first.
    """
    if isinstance(num_heads, list):
        num_heads = num_heads[0] if num_heads else 0

    def undo(array: Array) -> Array:
        is_number = type(num_heads) is int and num_heads > 0
        if not is_number or len(array) % (2 * num_heads):
            raise ValueError(f"{len(array)} rows cannot be those of {num_heads} heads")

        pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
        halves = pairs.swapaxes(1, 2)
        return halves.reshape(array.shape)

    return undo


def _third(index: int) -> Callable[[Array], Array]:
    def undo(array: Array) -> Array:
        num_rows = len(array) // 3
        return array[index * num_rows : (index + 1) * num_rows]

    return undo


def _less_one(array: Array) -> Array:
    if array.dtype != np.float32:
        raise ValueError("a norm must be F32")

    less: Array = array - np.float32(1)
    return less
