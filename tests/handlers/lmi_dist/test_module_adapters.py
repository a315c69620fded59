"""Which linears of a transformers model may have adapters: those that see the rows of a step as
they are.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from handlers.lmi_dist.attention import Attention
from handlers.lmi_dist.module_adapters import ModuleAdapters
from handlers.lmi_dist.operations import LowRank
from handlers.lmi_dist.packed_linears import PackedLinear
from handlers.lmi_dist.placement import dense
from handlers.lmi_dist.step_inputs import AdaptedRows, StepInputs


def new_linear() -> PackedLinear:
    return PackedLinear(nn.Linear(4, 6), dense)


def step_of(num_rows: int, wanted: list[int], *adapted: AdaptedRows) -> StepInputs:
    ids = torch.arange(num_rows)
    return StepInputs(ids, ids, torch.tensor(wanted), cast(Attention, None), adapted)


@torch.inference_mode()
def test_only_a_linear_that_sees_all_rows_or_the_wanted_ones_is_regular() -> None:
    linears = {name: new_linear() for name in ("layer", "head", "router", "expert", "idle")}
    adapters = ModuleAdapters(linears, lambda: step_of(5, [2, 4]))
    calls = {
        "layer": [(1, 5, 4)],
        "head": [(1, 2, 4)],
        "router": [(5, 4)],
        "expert": [(1, 5, 4), (1, 3, 4)],
    }
    for name, shapes in calls.items():
        for shape in shapes:
            linears[name](torch.randn(shape))

    known_modules = {
        site.modules[0].path: (site.num_in, site.num_out)
        for site in adapters.sites()
        if site.modules
    }

    assert known_modules == {"layer": (4, 6), "head": (4, 6)}


@torch.inference_mode()
def test_an_adapter_changes_its_rows_of_a_layer_and_of_the_head() -> None:
    step = step_of(5, [2, 4], AdaptedRows(7, torch.tensor([3, 4]), torch.tensor([1])))
    linears = {"layer": new_linear(), "head": new_linear()}
    all_rows = torch.randn(1, 5, 4)
    head_rows = torch.randn(1, 2, 4)
    before = linears["layer"](all_rows), linears["head"](head_rows)
    adapters = ModuleAdapters(linears, lambda: step)
    low = LowRank(torch.randn(2, 4), torch.randn(6, 2))
    adapters.put_adapter(7, (low, low))

    assert low.up is not None

    for x, rows, old, new in (
        (all_rows, [3, 4], before[0], linears["layer"](all_rows)),
        (head_rows, [1], before[1], linears["head"](head_rows)),
    ):
        expected = old.clone()
        expected[0, rows] += x[0, rows] @ low.down.t() @ low.up.t()

        assert torch.allclose(new, expected, atol=1e-5)
