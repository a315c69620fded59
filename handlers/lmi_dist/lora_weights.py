"""The weights of a LoRA adapter, in the form that the linears of a program need.

An adapter has two matrices A and B for each module that it changes, and adds scale * B A to its
weight. A site, which joins several modules, has their As one below the other and their Bs on a
diagonal, so that each B meets only the rows of its own A.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np

from handlers.lmi_dist.arrays import Array, are_equal, as_float32, dtype_name, is_float
from handlers.lmi_dist.linear_sites import Module, Site
from handlers.lmi_dist.operations import LowRank, Pack, Packed
from handlers.lmi_dist.peft import REFUSED, NotUsable, PeftConfig, check_rank

TensorOfModel: TypeAlias = Callable[[str], Array | None]
"""Returns the model's own tensor of a name, if it has one."""

# The names of PEFT: of an A or B, and of a tensor of the model that was saved with the adapter.
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_SAVED_NAME = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.(weight|bias)")
# The ends of the paths of embeddings.
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_positions")


class _MatrixName(NamedTuple):
    """The A or the B for the module at a path."""

    path: str
    letter: str


class LoraWeights:
    """The As and Bs of an adapter, by the path of the module that they change."""

    def __init__(self, tensors: Mapping[str, Array], tensor_of_model: TensorOfModel) -> None:
        """`tensors` are those of an adapter's file. Raises NotUsable for one that is no part of a
        plain LoRA adapter.
        """
        self._tensors = tensors
        self._tensor_of_model = tensor_of_model
        self._names: dict[_MatrixName, str] = {}
        for name in tensors:
            match = _NAME.fullmatch(name)
            if match:
                self._names[_MatrixName(match[1], match[2])] = name
            else:
                self._check_saved(name)

        self.paths = {part.path for part in self._names}

    def _check_saved(self, name: str) -> None:
        """Raise NotUsable for a tensor that is no A or B, unless the model has the same one."""
        match = _SAVED_NAME.fullmatch(name)
        tensor = None
        if match:
            tensor = self._tensor_of_model(f"{match[1]}.{match[2]}")

        if tensor is not None:
            self._check_equal(name, self._tensors[name], tensor)
        elif "lora_magnitude_vector" in name:
            raise NotUsable(REFUSED["use_dora"])
        elif "lora_embedding" in name or name.removesuffix(".weight").endswith(_EMBEDDINGS):
            raise NotUsable(f"it changes an embedding ({name}); only linears can have adapters")
        else:
            raise NotUsable(f"it has a tensor {name}, which is no part of a plain LoRA adapter")

    def _check_equal(self, name: str, saved: Array, tensor: Array) -> None:
        """Raise NotUsable unless a saved tensor is the model's own."""
        if saved.shape != tensor.shape:
            raise NotUsable(
                f"it resizes {name} to {saved.shape}, and this model's has {tensor.shape}"
            )

        if not are_equal(saved, tensor):
            raise NotUsable(
                f"it changes {name}, a weight of the base model; "
                "merge it into the model and serve that"
            )

    def check(self, config: PeftConfig, sites: tuple[Site, ...], max_rank: int) -> None:
        """Raise NotUsable unless each A has its B, both are of a module that `sites` have, and
        their rank has room.
        """
        possible_paths = {module.path for site in sites for module in site.modules}
        unknown = sorted(self.paths - possible_paths)
        if unknown:
            names = ", ".join(sorted({path.rpartition(".")[2] for path in possible_paths}))
            raise NotUsable(
                f"{unknown[0]} is not among the linears of this model that adapters can change: "
                f"{names}"
            )

        if not self.paths:
            raise NotUsable("it has no weights")

        largest_rank = max(config.rank(path) for path in self.paths)
        check_rank(largest_rank, max_rank)

        for path, letter in product(sorted(self.paths), "AB"):
            if _MatrixName(path, letter) not in self._names:
                raise NotUsable(f"it has no lora_{letter} of {path}")

    def take(self, module: Module, letter: str, shape: tuple[int, int]) -> Array:
        """Return the A or the B for a module in float32.

        Raises NotUsable for another shape or dtype.
        """
        name = self._names[_MatrixName(module.path, letter)]
        array = self._tensors[name]
        if array.shape != shape:
            raise NotUsable(
                f"lora_{letter} of {module.path} has shape {array.shape}, this model needs {shape}"
            )

        if not is_float(array):
            raise NotUsable(
                f"lora_{letter} of {module.path} is {dtype_name(array)}, "
                "not a float that is read here"
            )

        return as_float32(array)


def site_weights(
    site: Site, weights: LoraWeights, config: PeftConfig, pack: Pack[Packed]
) -> LowRank[Packed] | None:
    """Return what an adapter has for a site, or None if it changes none of its modules.

    Raises NotUsable for weights of another shape or dtype.
    """
    modules = [module for module in site.modules if module.path in weights.paths]
    if not modules:
        return None

    ranks = [config.rank(module.path) for module in modules]
    # The Bs for the weight and for the gate of the site, each in the columns of its A.
    up = np.zeros((site.num_out, sum(ranks)), np.float32)
    gate = np.zeros((site.num_out, sum(ranks)), np.float32)
    has_up = False
    has_gate = False
    downs: list[Array] = []
    first_column = 0
    for module, rank in zip(modules, ranks, strict=True):
        downs.append(weights.take(module, "A", (rank, module.num_in)))
        scale = np.float32(config.scale(module.path))
        rows = weights.take(module, "B", (module.num_out, rank)) * scale

        columns = slice(first_column, first_column + rank)
        first_column += rank
        for piece in module.pieces:
            rows_of_piece = rows[piece.first : piece.first + piece.num]
            rows_of_site = slice(piece.row, piece.row + piece.num)
            if piece.is_gate:
                gate[rows_of_site, columns] = rows_of_piece
                has_gate = True
            else:
                up[rows_of_site, columns] = rows_of_piece
                has_up = True

    packed_down = pack(np.concatenate(downs))
    packed_up = pack(up) if has_up else None
    packed_gate = pack(gate) if has_gate else None
    return LowRank(packed_down, packed_up, packed_gate)
