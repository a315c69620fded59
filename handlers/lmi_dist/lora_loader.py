"""Reads adapters for the model of a runner and gives them to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias

from handlers.lmi_dist.lora import Own, read_adapter, read_config
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.lora_sites import Site
from handlers.lmi_dist.operations import Adapter, Pack, Packed


class Adaptable(Protocol[Packed]):
    """A model whose chunks may name adapters by their numbers."""

    def put_adapter(self, number: int, adapter: Adapter[Packed]) -> None: ...

    def drop_adapter(self, number: int) -> None: ...


class LoraLoader(Generic[Packed]):
    """Any thread may check and read; `put` and `drop` belong to the thread that makes steps."""

    def __init__(
        self,
        sites: tuple[Site, ...],
        model: Adaptable[Packed],
        new_pack: Callable[[], Pack[Packed]],
        own: Own,
        limits: LoraLimits,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """`new_pack` gives what packs the weights of one adapter; `own` the model's weights, as its files have them."""
        self.limits, self._own = limits, own
        self._sites, self._model, self._new_pack, self._allow_pickle = sites, model, new_pack, allow_pickle

    def check(self, path: str) -> None:
        """Read the configuration of the adapter in folder `path`. Raises what `lora.read_config` raises."""
        read_config(Path(path), self._sites, self.limits.max_rank)

    def read(self, path: str) -> Adapter[Packed]:
        """Read the weights of the adapter in folder `path`. Raises what `lora.read_adapter` raises."""
        pack, max_rank = self._new_pack(), self.limits.max_rank
        return read_adapter(
            Path(path), self._sites, pack, self._own, max_rank=max_rank, allow_pickle=self._allow_pickle
        )

    def put(self, number: int, adapter: Adapter[Packed]) -> None:
        self._model.put_adapter(number, adapter)

    def drop(self, number: int) -> None:
        self._model.drop_adapter(number)


AnyLoader: TypeAlias = LoraLoader[Any]
