"""Adapters on the linears of a model that the modules of transformers run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.linear_sites import Module, Piece, Site
from handlers.lmi_dist.operations import Adapter
from handlers.lmi_dist.packed_linears import PackedLinear
from handlers.lmi_dist.step_inputs import StepInputs


class ModuleAdapters:
    """The adapters of a model, and its linears, which add to their outputs what the adapters have
    for them.

    The linear at index i is site i of an adapter. It is regular if it saw the rows of a step
    whenever it was called.
    """

    def __init__(self, linears: Mapping[str, PackedLinear], step: Callable[[], StepInputs]) -> None:
        """`linears` are modules by their paths; `step` gives the current step."""
        self._linears = list(linears.items())
        self._step = step
        self._adapters: dict[int, Adapter[Tensor]] = {}
        # By site, of those that have been called.
        self._is_regular: dict[int, bool] = {}
        for site, module in enumerate(linears.values()):
            module.register_forward_hook(partial(self._add, site))

    def put_adapter(self, number: int, adapter: Adapter[Tensor]) -> None:
        """Let rows use an adapter by its number, which is not 0."""
        self._adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if there is one of this number."""
        self._adapters.pop(number, None)

    def sites(self) -> tuple[Site, ...]:
        """Return a site for each linear. Adapters can change those that have been called and are
        regular.
        """
        sites: list[Site] = []
        for site, (path, linear) in enumerate(self._linears):
            num_in = linear.in_features
            num_out = linear.out_features
            modules: tuple[Module, ...] = ()
            if self._is_regular.get(site, False):
                whole = Piece(first=0, num=num_out, row=0)
                modules = (Module(path, num_in, (whole,)),)

            sites.append(Site(num_in, num_out, modules))

        return tuple(sites)

    def _add(
        self, site: int, linear: PackedLinear, arguments: tuple[Tensor, ...], y: Tensor
    ) -> None:
        """Add to the output (1, rows, out_features) of a linear, which was just called with (1,
        rows, in_features).
        """
        if not arguments:
            # It was called by keyword, and is not known to be regular.
            return

        x = arguments[0]
        step = self._step()
        num_rows = x.shape[1] if x.dim() == 3 and len(x) == 1 else -1
        is_regular = num_rows in (len(step.token_ids), len(step.wanted))
        self._is_regular[site] = is_regular and self._is_regular.get(site, True)
        if not is_regular:
            return

        has_all_rows = num_rows == len(step.token_ids)
        for adapted in step.adapted:
            weights = self._adapters[adapted.adapter][site]
            rows = adapted.rows if has_all_rows else adapted.wanted
            if weights is not None and weights.up is not None:
                low = functional.linear(x[0].index_select(0, rows), weights.down)
                y[0].index_add_(0, rows, functional.linear(low, weights.up))
