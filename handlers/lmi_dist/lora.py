"""LoRA adapters in the form that PEFT saves: read off the step loop, loaded by name, and admitted
to a batch.

An adapter adds scale * B A to the weight of each linear that its weights name. A site has the As of
the linears that it joins one below the other, and their Bs on a diagonal. What is not plain LoRA on
linears of this model, by the rules of PEFT 0.21, is refused with the reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from handlers.base.adapters import Adapters, LoadedAdapter, check_names, is_end
from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.arrays import Array, are_equal, as_float32, dtype_name, is_float
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.operations import Adapter, LowRank, Pack, Packed
from handlers.lmi_dist.program import Module, Site
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.weights import Checkpoint, open_tensors
from lmi.adapters.files import CONFIG, PICKLED, WEIGHTS
from lmi.errors import LmiError, OutOfMemory, UnknownAdapter, is_out_of_memory
from lmi.executor import ErrorKind
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

Number = TypeVar("Number", int, float)
# The model's own tensor of a name, if it has one.
TensorOfModel: TypeAlias = Callable[[str], Array | None]

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_BASE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.(weight|bias)")
_HEAD = "lm_head.weight"
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight")
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_positions")
# Names of methods of initialisation that also change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings that make something else of an adapter than low ranks of linears.
_REFUSED = {
    "modules_to_save": (
        "it replaces whole modules (modules_to_save); merge it into the model and serve that"
    ),
    "use_dora": "it is a DoRA adapter, which also rescales the weights",
    "trainable_token_indices": "it changes rows of the embedding (trainable_token_indices)",
    "lora_bias": "it has biases (lora_bias)",
    "target_parameters": "it changes parameters that are not linears (target_parameters)",
    "layer_replication": "it repeats layers of the model (layer_replication)",
    "alora_invocation_tokens": "it is active for a part of the prompt (alora_invocation_tokens)",
    "use_qalora": "it is a QALoRA adapter, which pools the inputs",
    "use_bdlora": "it is a block-diagonal adapter (use_bdlora)",
    "arrow_config": "it chooses among several adapters (arrow_config)",
    "kasa_config": "it is a KaSA adapter, which has singular values",
}


class NotUsable(Exception):
    """This engine cannot use the adapter. The text says why."""


class PeftConfig(msgspec.Struct, frozen=True):
    """What of adapter_config.json is used. `None` is PEFT's word for nothing."""

    peft_type: str = "LORA"
    r: Annotated[int, Meta(ge=1)] = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, Annotated[int, Meta(ge=1)]] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, path: str) -> int:
        """Return the rank of a linear, by its path."""
        return _pattern_value(self.rank_pattern or {}, path, self.r)

    def scale(self, path: str) -> float:
        """Return the factor of B A for a linear, by its path."""
        rank = self.rank(path)
        alpha = _pattern_value(self.alpha_pattern or {}, path, self.lora_alpha)
        if self.use_rslora:
            return float(alpha / rank**0.5)

        return float(alpha / rank)


def _pattern_value(patterns: Mapping[str, Number], path: str, otherwise: Number) -> Number:
    """The value of the first name that is the path or its end."""
    for name, value in patterns.items():
        if is_end(name, path):
            return value

    return otherwise


def check_rank(rank: int, max_rank: int) -> None:
    """Raise NotUsable if there is no room for a rank."""
    if rank > max_rank:
        raise NotUsable(f"its rank {rank} is over option.max_lora_rank={max_rank}")


def read_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json.

    Raises NotUsable, or what the file system and the decoder raise.
    """
    raw = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    try:
        config = msgspec.convert(raw, PeftConfig)
        check_names(rank_pattern=config.rank_pattern, alpha_pattern=config.alpha_pattern)
    except (msgspec.ValidationError, ValueError) as error:
        raise NotUsable(f"{CONFIG}: {error}") from None

    if config.peft_type.upper() != "LORA":
        raise NotUsable(f"it is an adapter of type {config.peft_type}, and only LORA is supported")

    if config.bias != "none":
        raise NotUsable(f"it changes biases (bias={config.bias})")

    method = config.init_lora_weights
    if isinstance(method, str) and method.lower().startswith(_CHANGES_BASE):
        raise NotUsable(
            f"it belongs to a base model whose weights {method} changed; "
            "convert it to a plain LoRA adapter"
        )

    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise NotUsable(reason)

    return config


class _Weights:
    """The As and Bs of an adapter, by the path of the linear that they change."""

    def __init__(self, tensors: Mapping[str, Array], tensor_of_model: TensorOfModel) -> None:
        self._tensors = tensors
        self._tensor_of_model = tensor_of_model
        # By path, and A or B.
        self._names: dict[tuple[str, str], str] = {}
        for name in tensors:
            match = _NAME.fullmatch(name)
            if match:
                self._names[match[1], match[2]] = name
            else:
                self._check_rest(name)

        self.paths = {path for path, _ in self._names}

    def _check_rest(self, name: str) -> None:
        """Raise NotUsable for a tensor that is no A or B, unless the model has the same one."""
        match = _BASE.fullmatch(name)
        tensor = None
        if match:
            tensor = self._tensor_of_model(f"{match[1]}.{match[2]}")

        if tensor is not None:
            self._check_equal(name, self._tensors[name], tensor)
        elif "lora_magnitude_vector" in name:
            raise NotUsable(_REFUSED["use_dora"])
        elif "lora_embedding" in name or name.removesuffix(".weight").endswith(_EMBEDDINGS):
            raise NotUsable(f"it changes an embedding ({name}); only linears can have adapters")
        else:
            raise NotUsable(f"it has a tensor {name}, which is no part of a plain LoRA adapter")

    def _check_equal(self, name: str, saved: Array, tensor: Array) -> None:
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
        """Raise NotUsable unless they are whole pairs of linears of this model, of ranks that have
        room.
        """
        paths = {module.path for site in sites for module in site.modules}
        unknown = sorted(self.paths - paths)
        if unknown:
            names = ", ".join(sorted({path.rpartition(".")[2] for path in paths}))
            raise NotUsable(
                f"{unknown[0]} is not among the linears of this model that adapters can change: "
                f"{names}"
            )

        if not self.paths:
            raise NotUsable("it has no weights")

        check_rank(max(map(config.rank, self.paths)), max_rank)
        for path, part in product(sorted(self.paths), "AB"):
            if (path, part) not in self._names:
                raise NotUsable(f"it has no lora_{part} of {path}")

    def take(self, module: Module, part: str, shape: tuple[int, int]) -> Array:
        array = self._tensors[self._names[module.path, part]]
        if array.shape != shape:
            raise NotUsable(
                f"lora_{part} of {module.path} has shape {array.shape}, this model needs {shape}"
            )

        if not is_float(array):
            raise NotUsable(
                f"lora_{part} of {module.path} is {dtype_name(array)}, "
                "not a float that is read here"
            )

        return as_float32(array)


def _site(
    site: Site, weights: _Weights, config: PeftConfig, pack: Pack[Packed]
) -> LowRank[Packed] | None:
    modules = [module for module in site.modules if module.path in weights.paths]
    if not modules:
        return None

    ranks = [config.rank(module.path) for module in modules]
    up = np.zeros((site.num_out, sum(ranks)), np.float32)
    gate = np.zeros((site.num_out, sum(ranks)), np.float32)
    has_up = False
    has_gate = False
    downs: list[Array] = []
    column = 0
    for module, rank in zip(modules, ranks, strict=True):
        downs.append(weights.take(module, "A", (rank, module.num_in)))
        scale = np.float32(config.scale(module.path))
        rows = weights.take(module, "B", (module.num_out, rank)) * scale
        columns = slice(column, column + rank)
        column += rank
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


class Adaptable(Protocol[Packed]):
    """A model whose chunks may name adapters by their numbers."""

    def put_adapter(self, number: int, adapter: Adapter[Packed]) -> None:
        """Let chunks use an adapter by its number, which is not 0."""

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if there is one of this number."""


@dataclass
class LoraLoader(Generic[Packed]):
    """Reads adapters for the sites of a model, on any thread; `model` belongs to the thread that
    makes steps.
    """

    facts: ModelFacts
    config: EngineConfig
    limits: LoraLimits
    sites: tuple[Site, ...]
    model: Adaptable[Packed]
    # It gives what packs the weights of one adapter.
    new_pack: Callable[[], Pack[Packed]]

    def check(self, path: str) -> None:
        """Raise what `read` raises for the configuration.

        The weights are read when a request wants them.
        """
        config = read_config(Path(path))
        rank = config.r
        if config.rank_pattern:
            rank = max(config.rank_pattern.values())

        check_rank(rank, self.limits.max_rank)

    def read(self, path: str) -> Adapter[Packed]:
        """Read the adapter in folder `path`.

        Raises NotUsable, SecurityRefused for a pickle, and what files raise.
        """
        folder = Path(path)
        pack = self.new_pack()
        config = read_config(folder)
        tensors = open_tensors(folder / WEIGHTS, folder / PICKLED, self.config.allow_pickle)
        weights = _Weights(tensors, self._tensor_of_model)
        weights.check(config, self.sites, self.limits.max_rank)
        return tuple(_site(site, weights, config, pack) for site in self.sites)

    def _tensor_of_model(self, name: str) -> Array | None:
        """The model's own tensor by its name in transformers, if it has one.

        Each call opens the model's files.
        """
        checkpoint = Checkpoint(self.facts.path, allow_pickle=self.config.allow_pickle)
        # A checkpoint of the model without its head lacks the first word.
        names = [name, name.partition(".")[2]]
        if self.facts.is_tied and name == _HEAD:
            names += [table for table in checkpoint.files if table.endswith(_TABLES)]

        for name_in_file in names:
            if name_in_file in checkpoint.files:
                return checkpoint.read(name_in_file)

        return None


AnyLoader: TypeAlias = LoraLoader[Any]
Prepared: TypeAlias = "Future[Adapter[Any] | None]"
"""What came of reading a folder, which is over: weights, or None if they were only checked, or an
error.
"""


class LoraAdapters(Adapters):
    """The loaded adapters, and the engine that they are loaded into.

    Any thread may also use `prepare`.
    """

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(self, "lmi-dist", loader.limits.max_in_batch, _kind_of)
        self._loader = loader
        self._prepared: Prepared | None = None

    def prepare(self, path: str, *, with_weights: bool) -> Prepared:
        """Read a folder while the engine makes steps."""
        prepared: Prepared = Future()
        try:
            if not with_weights:
                self._loader.check(path)

            prepared.set_result(self._loader.read(path) if with_weights else None)
        except Exception as error:
            # `load` raises it, unless the name is at fault.
            prepared.set_exception(error)

        return prepared

    def load_prepared(
        self, name: str, path: str, prepared: Prepared, *, pinned: bool, preload: bool
    ) -> None:
        """Load an adapter whose folder was read. Raises what `load` raises."""
        self._prepared = prepared
        try:
            self.load(name, path, pinned=pinned, preload=preload)
        finally:
            self._prepared = None

        # The newest stays too.
        self._evict(self.in_use.union(list(self._resident)[-1:]))

    def admit(self, sequence: EmbeddedSequence) -> bool:
        """Keep the adapter of a new sequence until `release`.

        If it was unloaded, the sequence fails.
        """
        try:
            adapter = self.claim(sequence)
        except UnknownAdapter as error:
            sequence.fail(error.message, ErrorKind.INVALID, error.field)
            return False

        sequence.adapter = 0 if adapter is None else adapter.number
        return True

    def may_run(self, sequence: EmbeddedSequence, running: SequenceOf[EmbeddedSequence]) -> bool:
        """Whether a sequence may run beside others, with at most `option.max_loras` adapters
        together.

        Its adapter's weights are there then, or it fails.
        """
        used = {row.adapter for row in running} - {0}
        if not sequence.adapter or sequence.adapter in used:
            return True

        if sequence.is_finished or len(used) >= self._loader.limits.max_in_batch:
            return False

        try:
            self.used_by(sequence)
        except LmiError as error:
            log.error("the adapter of request %d cannot be used: %s", sequence.id, error)
            sequence.fail(error.message, _kind_of(error), error.field)
            return False

        # The one that was used longest ago is the first.
        self._resident.move_to_end(sequence.adapter)
        self._evict(used | {sequence.adapter})
        return True

    def _evict(self, used: set[int]) -> None:
        """Drop the weights that were used longest ago, as far as memory has a limit."""
        max_in_memory = self._loader.limits.max_in_memory or len(self._resident)
        num_over = max(len(self._resident) - max_in_memory, 0)
        idle: list[LoadedAdapter] = []
        for adapter in self._resident.values():
            if adapter.number not in used and not adapter.is_pinned:
                idle.append(adapter)

        for adapter in idle[:num_over]:
            self.drop_weights(adapter)

    # What `Adapters` calls.

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        """Raise what came of reading the adapter's folder, if it was wrong."""
        if self._prepared is not None:
            self._prepared.result()

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Give the model the weights of an adapter, unless it has them."""
        if adapter.number in self._resident:
            return

        weights = None if self._prepared is None else self._prepared.result()
        weights = weights or self._loader.read(adapter.path)
        self._loader.model.put_adapter(adapter.number, weights)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """Let the model forget the weights of an adapter."""
        self._loader.model.drop_adapter(adapter.number)


def _kind_of(error: Exception) -> ErrorKind:
    is_full = isinstance(error, OutOfMemory) or is_out_of_memory(error)
    return ErrorKind.OUT_OF_MEMORY if is_full else ErrorKind.GENERATION
