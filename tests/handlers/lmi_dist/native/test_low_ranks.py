"""Adapters in the native kernels: products of any rank, and what breaks a rule is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from torch import Tensor

from handlers.lmi_dist.linear_sites import MAX_MODULES
from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import F32
from handlers.lmi_dist.native.step_lists import StepLists
from handlers.lmi_dist.operations import Adapter, Linear, LowRank, Program
from handlers.lmi_dist.placement import to_array
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.program import adapted
from tests.handlers.lmi_dist.native.builds import library, variants
from tests.handlers.lmi_dist.native.models import llama, packed, run_step
from tests.handlers.lmi_dist.whole_sequence import run

PLAIN = llama(max_length=200)
# So that a row between the two weights has 48 floats
MAX_RANK = 16
# the first of these operations
SHRINK = 2
LINEAR = 3
IDS = [(7 * index + 3) % 96 for index in range(130)]


def random_adapter(rank: int, seed: int = 0) -> Adapter[Tensor]:
    """Something for every second linear, and a gate only where the linear has one."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights: list[LowRank[Tensor] | None] = []
    for linear in linears(PLAIN):
        num_out, num_in = linear.weight.shape
        gate = None if linear.gate is None else random(num_out, rank)
        weights.append(LowRank(random(rank, num_in), random(num_out, rank), gate))

    return tuple(linear if (place + seed) % 2 else None for place, linear in enumerate(weights))


def linears(program: Program[Tensor]) -> list[Linear[Tensor]]:
    return [operation for operation in program.operations if isinstance(operation, Linear)]


def merged(adapter: Adapter[Tensor]) -> Program[Tensor]:
    """The program whose weights have the adapter's products in them, in float64."""
    sites = iter(adapter)
    operations = []
    for operation in PLAIN.operations:
        low = next(sites) if isinstance(operation, Linear) else None
        if isinstance(operation, Linear) and low is not None and low.up is not None:
            weight = operation.weight.double() + low.up.double() @ low.down.double()
            gate = operation.gate
            if gate is not None and low.gate is not None:
                gate = gate.double() + low.gate.double() @ low.down.double()

            operation = replace(operation, weight=weight, gate=gate)

        operations.append(operation)

    return replace(PLAIN, operations=tuple(operations))


def new_model(kind: str, num_threads: int = 2) -> NativeModel:
    kernels = library(kind)
    return NativeModel(kernels, packed(kernels, adapted(PLAIN, MAX_RANK), F32), 4, num_threads)


def put(model: NativeModel, number: int, adapter: Adapter[Tensor]) -> None:
    def pack(weight: Tensor | None) -> Any:
        return None if weight is None else library(variants()[0]).pack(to_array(weight), F32)

    kinds = [
        None
        if weights_of_site is None
        else LowRank(*map(pack, (weights_of_site.down, weights_of_site.up, weights_of_site.gate)))
        for weights_of_site in adapter
    ]
    model.put_adapter(number, tuple(kinds))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rank", [1, 7, 16, 31, 32, 33, MAX_MODULES * MAX_RANK])
def test_products_of_any_rank_are_those_of_merged_weights(rank: int, seed: int) -> None:
    model = new_model(variants()[0])
    adapter = random_adapter(rank, seed)
    put(model, 9, adapter)
    exact = run(merged(adapter), IDS, list(range(len(IDS))), torch.float64)
    plain = run(PLAIN, IDS, list(range(len(IDS))), torch.float64)
    blocks = [3, 0, 2]
    whole = run_step(model, [Chunk(0, 0, IDS, len(IDS), blocks, 9)])

    assert torch.allclose(whole.double(), exact, atol=1e-4) and not torch.allclose(
        exact, plain, atol=0.1
    )

    run_step(model, [Chunk(0, 0, IDS[:-1], 0, blocks, 9)])
    last = run_step(model, [Chunk(0, len(IDS) - 1, IDS[-1:], 1, blocks, 9)])

    assert torch.equal(last[0], whole[-1])


def test_a_dropped_adapter_is_unknown_and_the_others_stay() -> None:
    model = new_model(variants()[0])
    for number in (1, 2):
        put(model, number, random_adapter(4, number))

    expected = run_step(model, [Chunk(0, 0, IDS[:9], 1, [0], 2)])
    model.drop_adapter(1)
    with pytest.raises(KeyError):
        run_step(model, [Chunk(0, 0, IDS[:9], 1, [0], 1)])

    assert torch.equal(run_step(model, [Chunk(0, 0, IDS[:9], 1, [0], 2)]), expected)


@functools.cache
def model_with_two_adapters() -> NativeModel:
    model = new_model(variants()[0])
    for number in (1, 2):
        put(model, number, random_adapter(4, number))

    return model


numbers = st.one_of(st.integers(-3, 4), st.sampled_from([2**31 - 1, -(2**31)]))


@settings(max_examples=300)
@given(users=st.lists(numbers, min_size=3, max_size=3))
def test_a_step_with_any_numbers_of_adapters_runs_or_is_refused(users: list[int]) -> None:
    model = model_with_two_adapters()
    adapters = [model._adapters[number].sites for number in (1, 2)]
    step = StepLists(
        ids=[1, 2, 3],
        starts=[0, 0, 0],
        lengths=[1, 1, 1],
        blocks=[0, 1, 2],
        wanted=[0, 1, 2],
        users=users,
        adapters=adapters,
    )
    model._reserve(3, 3)
    if set(users) <= {-1, 0, 1}:
        model._run_step(step)
    else:
        with pytest.raises(ValueError, match="the adapter of a chunk must be from -1 to 1"):
            model._run_step(step)


@pytest.mark.parametrize(
    ("site", "part", "field", "value", "says"),
    [
        (0, "down", "num_out", 49, "rank of an adapter must be from 1 to 48, given 49"),
        (0, "down", "num_out", 0, "rank of an adapter"),
        (0, "down", "num_out", -1, "rank of an adapter"),
        (0, "down", "num_in", 65, "must be that of the linear's input, 64, given 65"),
        (0, "down", "format", 1, "format of a weight of an adapter must be float32, 0, given 1"),
        (0, "up", "num_in", 5, "that of the linear's output, 4, given 5"),
        (0, "up", "num_out", 127, "must be that of the linear's output, 128, given 127"),
        (0, "up", "format", 2, "format of a weight of an adapter"),
        (0, "gate", "data", 64, "gate of an adapted linear is missing"),
        (2, "gate", "num_out", 81, "must be that of the linear's output, 80, given 81"),
    ],
)
def test_a_wrong_weight_of_an_adapter_is_refused(
    site: int, part: str, field: str, value: int, says: str
) -> None:
    model = new_model(variants()[0])
    put(model, 1, random_adapter(4, seed=1))
    setattr(getattr(model._adapters[1].sites[site], part), field, value)
    with pytest.raises(ValueError, match=says):
        run_step(model, [Chunk(0, 0, [1, 2], 1, [0], 1)])

    # The adapter is not used
    run_step(model, [Chunk(0, 0, [1, 2], 1, [0])])


@pytest.mark.parametrize(
    ("op", "field", "value", "says"),
    [
        (SHRINK, "site", 0, "site of Shrink must be from 1 to 9, given 0"),
        (SHRINK, "site", 10, "site of Shrink"),
        (SHRINK, "site", 2, "site of a Linear behind Shrink must be that of Shrink, 2, given 1"),
        (SHRINK, "input", 0, "input of a Linear behind Shrink"),
        (SHRINK, "output", 0, "low of a Linear behind Shrink"),
        (SHRINK, "output", 11, "is_wanted of Shrink's output"),
        (SHRINK, "kind", 1, "weight of Norm is missing"),
        (SHRINK - 1, "kind", 6, "must have two buffers|site of Shrink"),
        (LINEAR, "site", -1, "site must be from 0 to 9"),
        (LINEAR, "site", 10, "site must be from 0 to 9"),
        (LINEAR, "site", 0, "site of a Linear behind Shrink"),
        (LINEAR, "low", -1, "low must be from 0 to 12"),
        (LINEAR, "low", 13, "low must be from 0 to 12"),
        (LINEAR, "low", 11, "is_wanted of low"),
    ],
)
def test_a_wrong_pair_of_operations_is_refused(op: int, field: str, value: int, says: str) -> None:
    model = new_model(variants()[0])
    setattr(model._ops[op], field, value)
    with pytest.raises(ValueError, match=says):
        run_step(model, [Chunk(0, 0, [1, 2], 1, [0])])


def test_a_step_that_does_not_say_who_uses_its_adapters_is_refused() -> None:
    model = new_model(variants()[0])
    put(model, 1, random_adapter(4, seed=1))
    model._reserve(1, 1)
    step = StepLists([1], [0], [1], [0], [0], adapters=[model._adapters[1].sites])
    with pytest.raises(ValueError, match="users is missing"):
        model._run_step(step)
