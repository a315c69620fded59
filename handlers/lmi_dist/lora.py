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
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from handlers.base.adapters import Adapters, LoadedAdapter, check_names, is_end
from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.operations import Adapter, LowRank, Pack, Packed
from handlers.lmi_dist.program import Module, Site
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.weights import (
    Array,
    Checkpoint,
    are_equal,
    as_float32,
    dtype_name,
    is_float,
    open_tensors,
)
from lmi.adapters.files import CONFIG, PICKLED, WEIGHTS
from lmi.errors import LmiError, OutOfMemory, UnknownAdapter, is_out_of_memory
from lmi.executor import ErrorKind
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

Number = TypeVar("Number", int, float)
Own: TypeAlias = Callable[[str], Array | None]  # the model's own tensor of a name, if it has one

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
        return _pattern_value(self.rank_pattern or {}, path, self.r)

    def scale(self, path: str) -> float:
        rank = self.rank(path)
        alpha = _pattern_value(self.alpha_pattern or {}, path, self.lora_alpha)
        return float(alpha / rank**0.5 if self.use_rslora else alpha / rank)


def _pattern_value(patterns: Mapping[str, Number], path: str, otherwise: Number) -> Number:
    """The value of the first name that is the path or its end."""
    return next((value for name, value in patterns.items() if is_end(name, path)), otherwise)


def check_rank(rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise NotUsable(f"its rank {rank} is over option.max_lora_rank={max_rank}")


def read_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json. Raises NotUsable, or what the file system and the decoder
    raise.
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
        why = (
            f"it belongs to a base model whose weights {method} changed; convert it to a plain "
            f"LoRA adapter"
        )
        raise NotUsable(why)

    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise NotUsable(reason)

    return config


class _Weights:
    """The As and Bs of an adapter, by the path of the linear that they change."""

    def __init__(self, tensors: Mapping[str, Array], own: Own) -> None:
        self._tensors = tensors
        self._names: dict[tuple[str, str], str] = {}  # by path, and A or B
        for name in tensors:
            if match := _NAME.fullmatch(name):
                self._names[match[1], match[2]] = name
            elif (base := _BASE.fullmatch(name)) and (
                known := own(f"{base[1]}.{base[2]}")
            ) is not None:
                if (saved := tensors[name]).shape != known.shape:
                    raise NotUsable(
                        f"it resizes {name} to {saved.shape}, and this model's has {known.shape}"
                    )

                if not are_equal(saved, known):
                    why = "a weight of the base model; merge it into the model and serve that"
                    raise NotUsable(f"it changes {name}, {why}")
            elif "lora_magnitude_vector" in name:
                raise NotUsable(_REFUSED["use_dora"])
            elif "lora_embedding" in name or name.removesuffix(".weight").endswith(_EMBEDDINGS):
                raise NotUsable(f"it changes an embedding ({name}); only linears can have adapters")
            else:
                raise NotUsable(f"it has a tensor {name}, which is no part of a plain LoRA adapter")

        self.paths = {path for path, _ in self._names}

    def check(self, config: PeftConfig, sites: tuple[Site, ...], max_rank: int) -> None:
        """Raise NotUsable unless they are whole pairs of linears of this model, of ranks that have
        room.
        """
        modules = {one.path for site in sites for one in site.modules}
        if unknown := sorted(self.paths - modules):
            known = ", ".join(sorted({path.rpartition(".")[2] for path in modules}))
            raise NotUsable(
                f"{unknown[0]} is not among the linears of this model that adapters can change: "
                f"{known}"
            )

        if not self.paths:
            raise NotUsable("it has no weights")

        check_rank(max(map(config.rank, self.paths)), max_rank)
        for path, part in ((path, part) for path in sorted(self.paths) for part in "AB"):
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
                f"lora_{part} of {module.path} is {dtype_name(array)}, not a float that is read "
                f"here"
            )

        return as_float32(array)


def _site(
    site: Site, weights: _Weights, config: PeftConfig, pack: Pack[Packed]
) -> LowRank[Packed] | None:
    modules = [one for one in site.modules if one.path in weights.paths]
    if not modules:
        return None

    ranks = [config.rank(one.path) for one in modules]
    up, gate = (np.zeros((site.num_out, sum(ranks)), np.float32) for _ in range(2))
    column = 0
    downs = []
    for module, rank in zip(modules, ranks, strict=True):
        downs.append(weights.take(module, "A", (rank, module.num_in)))
        rows = weights.take(module, "B", (module.num_out, rank)) * np.float32(
            config.scale(module.path)
        )
        for piece in module.pieces:
            to = (gate if piece.is_gate else up)[
                piece.row : piece.row + piece.num, column : column + rank
            ]
            to[:] = rows[piece.first : piece.first + piece.num]

        column += rank

    has_gate = {piece.is_gate for one in modules for piece in one.pieces}
    down = pack(np.concatenate(downs))
    return LowRank(
        down, pack(up) if False in has_gate else None, pack(gate) if True in has_gate else None
    )


class Adaptable(Protocol[Packed]):
    """A model whose chunks may name adapters by their numbers."""

    def put_adapter(self, number: int, adapter: Adapter[Packed]) -> None: ...

    def drop_adapter(self, number: int) -> None: ...


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
    new_pack: Callable[[], Pack[Packed]]  # gives what packs the weights of one adapter

    def check(self, path: str) -> None:
        """Raise what `read` raises for the configuration. The weights are read when a request wants
        them.
        """
        config = read_config(Path(path))
        check_rank(max((config.rank_pattern or {"": config.r}).values()), self.limits.max_rank)

    def read(self, path: str) -> Adapter[Packed]:
        """Read the adapter in folder `path`. Raises NotUsable, SecurityRefused for a pickle, and
        what files raise.
        """
        folder = Path(path)
        pack = self.new_pack()
        config = read_config(folder)
        weights = _Weights(
            open_tensors(folder / WEIGHTS, folder / PICKLED, self.config.allow_pickle), self._own
        )
        weights.check(config, self.sites, self.limits.max_rank)
        return tuple(_site(site, weights, config, pack) for site in self.sites)

    def _own(self, name: str) -> Array | None:
        """The model's own tensor by its name in transformers, if it has one. Each call opens the
        model's files.
        """
        checkpoint = Checkpoint(self.facts.path, allow_pickle=self.config.allow_pickle)
        names = [
            name,
            name.partition(".")[2],
        ]  # a checkpoint of the model without its head lacks the first word
        if self.facts.is_tied and name == _HEAD:
            names += [one for one in checkpoint.files if one.endswith(_TABLES)]

        return next((checkpoint.read(one) for one in names if one in checkpoint.files), None)


AnyLoader: TypeAlias = LoraLoader[Any]
Prepared: TypeAlias = "Future[Adapter[Any] | None]"
"""What came of reading a folder, which is over: weights, or None if they were only checked, or an
error.
"""


class LoraAdapters(Adapters):
    """The loaded adapters, and the engine that they are loaded into. Any thread may also use
    `prepare`.
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
        except Exception as error:  # `load` raises it, unless the name is at fault
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

        self._evict(self.in_use.union(list(self._resident)[-1:]))  # not the newest either

    def admit(self, sequence: EmbeddedSequence) -> bool:
        """Keep the adapter of a new sequence until `release`. If it was unloaded, the sequence
        fails.
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
        used = {one.adapter for one in running} - {0}
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

        self._resident.move_to_end(sequence.adapter)  # the one used longest ago is the first
        self._evict(used | {sequence.adapter})
        return True

    def _evict(self, used: set[int]) -> None:
        """Drop the weights that were used longest ago, as far as memory has a limit."""
        num_over = len(self._resident) - (self._loader.limits.max_in_memory or len(self._resident))
        idle = [
            one for one in self._resident.values() if one.number not in used and not one.is_pinned
        ]
        for adapter in idle[: max(num_over, 0)]:
            self.drop_weights(adapter)

    # What `Adapters` calls.

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        if self._prepared is not None:
            self._prepared.result()

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        if adapter.number not in self._resident:
            weights = None if self._prepared is None else self._prepared.result()
            self._loader.model.put_adapter(
                adapter.number, weights or self._loader.read(adapter.path)
            )

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self._loader.model.drop_adapter(adapter.number)


def _kind_of(error: Exception) -> ErrorKind:
    is_full = isinstance(error, OutOfMemory) or is_out_of_memory(error)
    return ErrorKind.OUT_OF_MEMORY if is_full else ErrorKind.GENERATION
