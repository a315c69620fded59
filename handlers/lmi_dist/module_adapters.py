"""Adapters of a transformers model: what they add to the outputs of its linears.

Only linears that see the rows of a step as they are can have adapters. Those that see them in another order, as behind
a router, are found while the model is checked at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.lora_sites import Module, Piece, Site
from handlers.lmi_dist.model import Step
from handlers.lmi_dist.operations import Adapter
from handlers.lmi_dist.packed_linear import PackedLinear


class ModuleAdapters:
    def __init__(self, linears: Mapping[str, PackedLinear], step: Callable[[], Step]) -> None:
        """`linears` are modules by their paths; `step` gives the current step."""
        self._linears, self._step = list(linears.items()), step
        self._adapters: dict[int, Adapter[Tensor]] = {}
        self._is_regular: dict[int, bool] = {}  # by site: whether it saw the rows of a step whenever it was called
        for site, module in enumerate(linears.values()):
            module.register_forward_hook(partial(self._add, site))

    def put_adapter(self, number: int, adapter: Adapter[Tensor]) -> None:
        self._adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def sites(self) -> tuple[Site, ...]:
        """A site for each linear; adapters can change those that have been called and are regular."""
        return tuple(self._site(*linear, site) for site, linear in enumerate(self._linears))

    def _site(self, path: str, linear: PackedLinear, site: int) -> Site:
        num_in, num_out = linear.in_features, linear.out_features
        module = Module(path, num_in, num_out, (Piece(0, num_out, 0),))
        return Site(num_in, num_out, (module,) if self._is_regular.get(site, False) else ())

    def _add(self, site: int, linear: PackedLinear, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        """Add to the output (1, rows, out_features) of a linear, which was just called with (1, rows, in_features)."""
        if not arguments:
            return  # it was called by keyword, and is not known to be regular
        x, step = arguments[0], self._step()
        num_rows = x.shape[1] if x.dim() == 3 and len(x) == 1 else -1
        is_regular = num_rows in (len(step.token_ids), len(step.wanted))
        self._is_regular[site] = is_regular and self._is_regular.get(site, True)
        for one in step.adapted if is_regular else ():
            weights = self._adapters[one.adapter][site]
            rows = one.rows if num_rows == len(step.token_ids) else one.wanted
            if weights is not None and weights.up is not None:
                low = functional.linear(x[0].index_select(0, rows), weights.down)
                y[0].index_add_(0, rows, functional.linear(low, weights.up))
