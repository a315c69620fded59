"""Embeddings of prompts: what a checkpoint says of them, and how its hidden states become one.

A checkpoint is an embedding model if it has the modules of sentence-transformers (modules.json, and config.json in the
folder of Pooling), or if its class has no head, as MistralModel. Then, as in vLLM, the embedding is the state of the
last token, normalised. Sums are in float64 and in the order of the tokens, so it does not depend on cuts of the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.config_file import class_name, is_headless, unsupported
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.weights import Array, read_json
from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.executor import Embeddings, Tensor
from lmi.executor.checks import MAX_INT
from lmi.settings.config import EngineConfig

if TYPE_CHECKING:
    from handlers.lmi_dist.scheduler import Batch

MODES = {"mean": True, "lasttoken": False}  # of Pooling, and whether it needs the states of all tokens
FLAG = "pooling_mode_"  # how the names of modes begin in older files
LEAST_NORM = 1e-12  # as of torch's normalize


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the states (num_tokens, size) behind the last norm become an embedding."""

    is_mean: bool  # of all tokens; otherwise it is the state of the last one
    is_normalised: bool
    embeddings: Embeddings
    max_length: int  # tokens: those that the model was trained for, or its context

    def take(self, batch: "Batch", states: Array) -> list[EmbeddedSequence]:
        """Pool the states (num_wanted, size) of a step. Returns the sequences that have their embedding or an error.

        Sequences change only after all is computed, so that a step that ran out of memory can be repeated.
        """
        pooled = [
            (sequence, chunk.end, self._pool(sequence, states[row : row + chunk.num_logits]))
            for chunk, sequence, row in batch.prefilling()
        ]
        for sequence, end, state in pooled:
            sequence.num_computed = end
            if end < sequence.num_prompt_tokens:
                sequence.pooled = state
            else:
                self._end(sequence, state)
        return [sequence for sequence, _, _ in pooled if sequence.is_finished]

    def _pool(self, sequence: EmbeddedSequence, states: Array) -> Array | None:
        """The sum, float64 (size,), of all states so far, or the last one, or None inside a prompt without a sum."""
        if not self.is_mean:
            return states[-1].astype(np.float64) if len(states) else None
        total = np.zeros(states.shape[1]) if sequence.pooled is None else sequence.pooled.copy()
        for state in states:
            total += state
        return total

    def _end(self, sequence: EmbeddedSequence, state: Array | None) -> None:
        asked = sequence.request.pooling_params
        assert asked is not None and state is not None
        embedding = (state / sequence.num_prompt_tokens if self.is_mean else state)[: asked.dimensions]
        if self.is_normalised:
            embedding = embedding / max(float(np.linalg.norm(embedding)), LEAST_NORM)
        if np.isfinite(embedding).all():
            sequence.embed(Tensor(embedding.shape, "float32", embedding.astype("<f4").tobytes()))
        else:
            sequence.fail("the model's hidden states for the prompt are not numbers")

    def check(self, config: EngineConfig) -> None:
        """Raise BadConfiguration for an option that needs a model which generates."""
        given = {
            "enable_lora": LoraLimits.of(config.options),
            "additional_outputs": config.additional_outputs,
            "logits_post_processors": config.logits_post_processors,
        }
        if faults := [
            f"option.{name}: lmi-dist does not have it for an embedding model" for name in given if given[name]
        ]:
            raise BadConfiguration("\n".join(faults))


def read_pooling(file: Path, config: Mapping[str, Any], architecture: Architecture | None) -> Pooling | None:
    """The pooling of the checkpoint with this config.json, or None if it generates text.

    Raises ModelUnusable for an embedding model that cannot run here, as one without an architecture of ours.
    """
    folder = file.parent
    modules = {_kind(one): folder / str(one.get("path", "")) for one in _read(folder / "modules.json", list) or ()}
    if "Pooling" not in modules and not is_headless(config["architectures"]):
        return None
    if architecture is None or architecture.names.keys() & {"norm", "project_out"} != {"norm"}:
        name = class_name(config["architectures"])
        raise unsupported(file, f"lmi-dist makes no embeddings with this form of {name}")
    for kind in modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise unsupported(folder / "modules.json", f"lmi-dist does not know the module {shorten(kind)}")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise unsupported(file, "its tokens attend to later ones, which lmi-dist does not let them")
    mode = _mode(modules["Pooling"] / "config.json") if "Pooling" in modules else "lasttoken"
    size, sizes = architecture.hidden_size, config.get("matryoshka_dimensions") or ()
    is_matryoshka = bool(sizes or config.get("is_matryoshka"))
    if not isinstance(sizes, list | tuple) or not all(type(one) is int and 0 < one <= size for one in sizes):
        raise ModelUnusable(f"{file}: matryoshka_dimensions must be a list of numbers up to {size}")
    longest = (_read(folder / "sentence_bert_config.json", dict) or {}).get("max_seq_length")
    return Pooling(
        is_mean=MODES[mode],
        is_normalised="Normalize" in modules or "Pooling" not in modules,
        embeddings=Embeddings(size, tuple(sizes) if is_matryoshka else None),
        max_length=min(architecture.context_length, longest if type(longest) is int and longest > 0 else MAX_INT),
    )


def _kind(module: Any) -> str:
    return str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""


def _mode(file: Path) -> str:
    """The word of a Pooling's only mode, of MODES. Raises ModelUnusable for others."""
    config = _read(file, dict) or {}
    flags = [name.removeprefix(FLAG) for name in config if name.startswith(FLAG) and config[name]]
    modes: list[str] = [name.removesuffix("_tokens") for name in flags] or [str(config.get("pooling_mode", "mean"))]
    if len(modes) > 1 or modes[0] not in MODES:
        raise unsupported(file, f"lmi-dist pools by {' or '.join(MODES)}, not by {' and '.join(modes)}")
    return modes[0]


def _read(file: Path, kind: type) -> Any:
    return read_json(file, kind) if file.is_file() else None
