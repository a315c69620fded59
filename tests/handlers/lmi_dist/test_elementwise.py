"""The parts of a step outside the matrix products: row i has the same bits in any number of rows."""

from __future__ import annotations

import pytest
import torch

from handlers.lmi_dist.elementwise import ACTIVATIONS, gate, rotate

SIZES = [3, 17, 64, 65, 129, 293, 700]


@pytest.fixture(autouse=True, params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [100, 112, 512, 688])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_a_gate_gives_a_row_the_same_bits_in_every_batch(name: str, width: int) -> None:
    x = torch.randn(SIZES[-1], 2 * width, generator=torch.Generator().manual_seed(0))
    activation = ACTIVATIONS[name]
    pairs = torch.cat([gate(x[first : first + 2].clone(), activation) for first in range(0, len(x), 2)])
    torch.testing.assert_close(pairs, activation(x[:, :width]) * x[:, width:])
    for size in SIZES:
        assert torch.equal(gate(x[:size].clone(), activation), pairs[:size])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(7, 1, 16), (4, 2, 32), (12, 3, 64), (9, 1, 24)])
def test_a_rotation_gives_a_row_the_same_bits_in_every_batch(heads: int, kv_heads: int, head_dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SIZES[-1], heads + 1, kv_heads, head_dim, generator=draw)  # the last head is not rotated
    angles = torch.randn(SIZES[-1], 1, 1, head_dim // 2, generator=draw)
    rotations = torch.polar(torch.ones_like(angles), angles)

    def rotated(first: int, last: int) -> torch.Tensor:
        return rotate(x[first:last].clone()[:, :heads], rotations[first:last])

    pairs = torch.cat([rotated(first, first + 2) for first in range(0, len(x), 2)])
    for size in SIZES:
        assert torch.equal(rotated(0, size), pairs[:size])


def test_a_rotation_turns_neighbouring_channels() -> None:
    x = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]])
    quarter = torch.tensor([[[[1j, 1j]]]])
    assert rotate(x, quarter).flatten().tolist() == [0.0, 1.0, -2.0, 0.0]
    assert rotate(torch.tensor([[[[1.0, 0.0]]]]).bfloat16(), quarter[..., :1]).flatten().tolist() == [0.0, 1.0]
