"""The loader of LoRA adapters for the linears of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.linear_sites import Site
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.lora_weights import LoraWeights, site_weights
from handlers.lmi_dist.operations import Adapter, Pack, Packed
from handlers.lmi_dist.peft import check_rank, read_config
from handlers.lmi_dist.weights import Checkpoint, open_tensors
from lmi.adapters.files import PICKLED, WEIGHTS
from lmi.settings.config import EngineConfig

# The names of the head in transformers, and the ends of those of the embedding.
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


class Adaptable(Protocol[Packed]):
    """A model that computes each chunk with the adapter whose number the chunk has."""

    def put_adapter(self, number: int, adapter: Adapter[Packed]) -> None:
        """Let chunks use an adapter by its number, which is not 0."""

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if there is one of this number."""


@dataclass
class LoraLoader(Generic[Packed]):
    """Reads adapters of one model. Any thread may call it."""

    facts: ModelFacts
    config: EngineConfig
    limits: LoraLimits
    sites: tuple[Site, ...]
    # It belongs to the thread that makes steps, which gives it what was read.
    model: Adaptable[Packed]
    # Called for each adapter: gives what packs its weights.
    new_pack: Callable[[], Pack[Packed]]

    def check(self, path: str) -> None:
        """Read only the configuration in folder `path`. Raises what `read` raises for it."""
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
        """Return the model's own tensor by its name in transformers, or None if it has none.

        Each call opens the model's files.
        """
        checkpoint = Checkpoint(self.facts.path, allow_pickle=self.config.allow_pickle)
        # A checkpoint of the model without its head lacks the first word.
        possible_names = [name, name.partition(".")[2]]
        if self.facts.is_tied and name == _HEAD:
            for name_in_file in checkpoint.files:
                if name_in_file.endswith(_EMBEDDINGS):
                    possible_names.append(name_in_file)

        for possible_name in possible_names:
            if possible_name in checkpoint.files:
                return checkpoint.read(possible_name)

        return None


AnyLoader: TypeAlias = LoraLoader[Any]
