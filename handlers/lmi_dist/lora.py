"""LoRA adapters in the form that PEFT saves, and the sites of a program that they change.

An adapter adds scale * B A to the weight of each linear that it names. A program joins what transformers keeps apart:
queries, keys and values, or the gate beside its linear. So a site is a linear of the program, and has the As of the
linears that it joins one below the other, and their Bs on a diagonal. Sites are in the order of the program's linears.
Which linears an adapter changes, its weights say. What is not plain LoRA on linears of this model, by the rules of
PEFT 0.21, is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from handlers.base.adapters import check_names, is_end
from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.operations import Adapter, Cap, Linear, LowRank, Operation, Pack, Packed, Program, Shrink
from handlers.lmi_dist.weights import Array, Checkpoint, are_equal, as_float32, dtype_name, is_float, open_tensors
from lmi.adapters.files import CONFIG, PICKLED, WEIGHTS
from lmi.settings.config import EngineConfig

Number = TypeVar("Number", int, float)
Own: TypeAlias = Callable[[str], Array | None]  # the model's own tensor of a name, if it has one

MAX_MODULES = 3  # of one site
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_BASE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.(weight|bias)")
_HEAD, _TABLES = "lm_head.weight", ("embed_tokens.weight", "embed_in.weight", "wte.weight")
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_positions")
# Names of methods of initialisation that also change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings that make something else of an adapter than low ranks of linears.
_REFUSED = {
    "modules_to_save": "it replaces whole modules (modules_to_save); merge it into the model and serve that",
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a module that are rows of the site's weight, or of its gate."""

    first: int  # of the module
    num: int
    row: int  # of the site
    is_gate: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A linear of transformers."""

    path: str
    num_in: int
    num_out: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Site:
    num_in: int
    num_out: int
    modules: tuple[Module, ...]  # none: no adapter can change it


def sites_of(architecture: Architecture) -> tuple[Site, ...]:
    a = architecture
    path, shape = a.names["head"], (a.hidden_size, a.vocab_size)
    # The head cannot be changed where its weight is joined with a projection.
    head = Site(*shape, () if "project_out" in a.names else (Module(path, *shape, (Piece(0, a.vocab_size, 0),)),))
    return (*(site for layer in range(a.num_layers) for site in _sites_of_layer(a, layer)), head)


def adapted(program: Program[Packed], max_rank: int) -> Program[Packed]:
    """The same program for batches in which rows may have adapters of at most this rank.

    A Shrink stands before each linear, and what it writes in two buffers before the last: of all and of wanted rows.
    """
    logits, width = len(program.widths) - 1, MAX_MODULES * max_rank
    operations: list[Operation[Packed]] = []
    num_sites = 0
    for operation in program.operations:
        if isinstance(operation, Linear):
            low = logits + (operation.output in program.wanted)
            operations.append(Shrink(operation.input, low, num_sites))
            output = logits + 2 if operation.output == logits else operation.output
            operation = replace(operation, output=output, site=num_sites, low=low)
            num_sites += 1
        elif isinstance(operation, Cap):
            operation = replace(operation, buffer=logits + 2)
        operations.append(operation)
    return replace(
        program,
        operations=tuple(operations),
        widths=(*program.widths[:-1], width, width, program.widths[-1]),
        wanted=program.wanted - {logits} | {logits + 1, logits + 2},
        num_sites=num_sites,
    )


def _sites_of_layer(a: Architecture, layer: int) -> Iterator[Site]:
    def module(name: str, num_in: int, *pieces: Piece) -> Module:
        return Module(a.names[name].format(layer), num_in, sum(piece.num for piece in pieces), pieces)

    num_heads, num_keys, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size
    width = num_heads + 2 * num_keys
    qkv = {"q": (num_heads, 0), "k": (num_keys, num_heads), "v": (num_keys, num_heads + num_keys), "qkv": (width, 0)}
    feed_forward = {
        "up": (Piece(0, inner, 0),),
        "gate": (Piece(0, inner, 0, is_gate=True),),
        "gate_up": (Piece(0, inner, 0, is_gate=True), Piece(inner, inner, 0)),
    }
    heads = [module(name, a.hidden_size, Piece(0, num, row)) for name, (num, row) in qkv.items() if name in a.names]
    first = [module(name, a.hidden_size, *pieces) for name, pieces in feed_forward.items() if name in a.names]
    yield Site(a.hidden_size, width, tuple(heads))
    yield Site(num_heads, a.hidden_size, (module("o", num_heads, Piece(0, a.hidden_size, 0)),))
    yield Site(a.hidden_size, inner, tuple(first))
    yield Site(inner, a.hidden_size, (module("down", inner, Piece(0, a.hidden_size, 0)),))


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
        rank, alpha = self.rank(path), _pattern_value(self.alpha_pattern or {}, path, self.lora_alpha)
        return float(alpha / rank**0.5 if self.use_rslora else alpha / rank)


def _pattern_value(patterns: Mapping[str, Number], path: str, otherwise: Number) -> Number:
    """The value of the first name that is the path or its end."""
    return next((value for name, value in patterns.items() if is_end(name, path)), otherwise)


def read_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json. Raises NotUsable, or what the file system and the decoder raise."""
    raw = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    try:
        config = msgspec.convert(raw, PeftConfig)
        check_names(rank_pattern=config.rank_pattern, alpha_pattern=config.alpha_pattern)
    except (msgspec.ValidationError, ValueError) as error:
        raise NotUsable(f"{CONFIG}: {error}") from None
    for reason in _reasons(raw, config):
        raise NotUsable(reason)
    return config


def _reasons(raw: Mapping[str, Any], config: PeftConfig) -> Iterator[str]:
    if config.peft_type.upper() != "LORA":
        yield f"it is an adapter of type {config.peft_type}, and only LORA is supported"
    if config.bias != "none":
        yield f"it changes biases (bias={config.bias})"
    method = config.init_lora_weights
    if isinstance(method, str) and method.lower().startswith(_CHANGES_BASE):
        yield f"it belongs to a base model whose weights {method} changed; convert it to a plain LoRA adapter"
    yield from (reason for name, reason in _REFUSED.items() if raw.get(name))


class _Weights:
    """The As and Bs of an adapter, by the path of the linear that they change."""

    def __init__(self, tensors: Mapping[str, Array], own: Own) -> None:
        self._tensors = tensors
        self._names: dict[tuple[str, str], str] = {}
        for name in tensors:
            if match := _NAME.fullmatch(name):
                self._names[match[1], match[2]] = name
            elif (base := _BASE.fullmatch(name)) and (known := own(f"{base[1]}.{base[2]}")) is not None:
                if (saved := tensors[name]).shape != known.shape:
                    raise NotUsable(f"it resizes {name} to {saved.shape}, and this model's has {known.shape}")
                if not are_equal(saved, known):
                    why = "a weight of the base model; merge it into the model and serve that"
                    raise NotUsable(f"it changes {name}, {why}")
            else:
                raise NotUsable(_why_not(name))

    @property
    def paths(self) -> set[str]:
        return {path for path, _ in self._names}

    def check(self, config: PeftConfig, sites: tuple[Site, ...], max_rank: int) -> None:
        """Raise NotUsable unless they are whole pairs of linears of this model, of ranks that have room."""
        modules = {one.path for site in sites for one in site.modules}
        if unknown := sorted(self.paths - modules):
            known = ", ".join(sorted({path.rpartition(".")[2] for path in modules}))
            raise NotUsable(f"{unknown[0]} is not among the linears of this model that adapters can change: {known}")
        if not self.paths:
            raise NotUsable("it has no weights")
        if (rank := max(map(config.rank, self.paths))) > max_rank:
            raise NotUsable(f"its rank {rank} is over option.max_lora_rank={max_rank}")
        for path, part in ((path, part) for path in sorted(self.paths) for part in "AB"):
            if (path, part) not in self._names:
                raise NotUsable(f"it has no lora_{part} of {path}")

    def take(self, module: Module, part: str, shape: tuple[int, int]) -> Array:
        array = self._tensors[self._names[module.path, part]]
        if array.shape != shape:
            raise NotUsable(f"lora_{part} of {module.path} has shape {array.shape}, this model needs {shape}")
        if not is_float(array):
            raise NotUsable(f"lora_{part} of {module.path} is {dtype_name(array)}, not a float that is read here")
        return as_float32(array)


def _site(site: Site, weights: _Weights, config: PeftConfig, pack: Pack[Packed]) -> LowRank[Packed] | None:
    modules = [one for one in site.modules if one.path in weights.paths]
    if not modules:
        return None
    ranks = [config.rank(one.path) for one in modules]
    up, gate = (np.zeros((site.num_out, sum(ranks)), np.float32) for _ in range(2))
    column, downs = 0, []
    for module, rank in zip(modules, ranks, strict=True):
        downs.append(weights.take(module, "A", (rank, module.num_in)))
        rows = weights.take(module, "B", (module.num_out, rank)) * np.float32(config.scale(module.path))
        for piece in module.pieces:
            to = (gate if piece.is_gate else up)[piece.row : piece.row + piece.num, column : column + rank]
            to[:] = rows[piece.first : piece.first + piece.num]
        column += rank
    has_gate = {piece.is_gate for one in modules for piece in one.pieces}
    down = pack(np.concatenate(downs))
    return LowRank(down, pack(up) if False in has_gate else None, pack(gate) if True in has_gate else None)


def _why_not(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return _REFUSED["use_dora"]
    if "lora_embedding" in name or name.removesuffix(".weight").endswith(_EMBEDDINGS):
        return f"it changes an embedding ({name}); only linears can have adapters"
    return f"it has a tensor {name}, which is no part of a plain LoRA adapter"


class Adaptable(Protocol[Packed]):
    """A model whose chunks may name adapters by their numbers."""

    def put_adapter(self, number: int, adapter: Adapter[Packed]) -> None: ...

    def drop_adapter(self, number: int) -> None: ...


class LoraLoader(Generic[Packed]):
    """Reads adapters for the sites of a model, on any thread; `model` belongs to the thread that makes steps."""

    def __init__(
        self,
        facts: ModelFacts,
        config: EngineConfig,
        limits: LoraLimits,
        sites: tuple[Site, ...],
        model: Adaptable[Packed],
        new_pack: Callable[[], Pack[Packed]],
    ) -> None:
        """`new_pack` gives what packs the weights of one adapter."""
        self.limits, self.model = limits, model
        self._facts, self._allow_pickle, self._sites, self._new_pack = facts, config.allow_pickle, sites, new_pack

    def check(self, path: str) -> None:
        """Raise what `read` raises, of what a folder says of its weights."""
        self._open(path)

    def read(self, path: str) -> Adapter[Packed]:
        """Read the adapter in folder `path`. Raises NotUsable, SecurityRefused for a pickle, and what files raise."""
        config, weights = self._open(path)
        pack = self._new_pack()
        return tuple(_site(site, weights, config, pack) for site in self._sites)

    def _open(self, path: str) -> tuple[PeftConfig, _Weights]:
        folder = Path(path)
        config = read_config(folder)
        weights = _Weights(open_tensors(folder / WEIGHTS, folder / PICKLED, self._allow_pickle), self._own)
        weights.check(config, self._sites, self.limits.max_rank)
        return config, weights

    def _own(self, name: str) -> Array | None:
        """The model's own tensor by its name in transformers, if it has one. Each call opens the model's files."""
        checkpoint = Checkpoint(self._facts.path, allow_pickle=self._allow_pickle)
        names = [name, name.partition(".")[2]]  # a checkpoint of the model without its head lacks the first word
        if self._facts.is_tied and name == _HEAD:
            names += [one for one in checkpoint.names if one.endswith(_TABLES)]
        return next((checkpoint.read(one) for one in names if one in checkpoint), None)


AnyLoader: TypeAlias = LoraLoader[Any]
