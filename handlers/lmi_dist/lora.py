"""The loader of LoRA adapters for the sites of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias

from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.lora_weights import LoraWeights, site_weights
from handlers.lmi_dist.operations import Adapter, Pack, Packed
from handlers.lmi_dist.peft import check_rank, read_config
from handlers.lmi_dist.program import Site
from handlers.lmi_dist.weights import Checkpoint, open_tensors
from lmi.adapters.files import PICKLED, WEIGHTS
from lmi.settings.config import EngineConfig

_HEAD = "lm_head.weight"
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


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
    # Gives what packs the weights of one adapter.
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
        weights = LoraWeights(tensors, self._tensor_of_model)
        weights.check(config, self.sites, self.limits.max_rank)
        return tuple(site_weights(site, weights, config, pack) for site in self.sites)

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
