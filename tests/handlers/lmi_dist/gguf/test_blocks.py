"""The numbers in blocks are those of ggml's own reader, bit for bit."""

import gguf
import numpy as np
import pytest

from handlers.lmi_dist.gguf.blocks import BLOCKS_AT_A_TIME, DEQUANTISE, ZERO4, ZERO8, dequantise
from lmi.shared.gguf_file import TENSOR_TYPES, TensorType

WITH_BLOCKS = [kind for kind in TENSOR_TYPES.values() if kind.num_elements > 1]


def random_blocks(kind: TensorType, num_blocks: int) -> np.ndarray:
    """Blocks of any bytes, whose scales are finite: those of a broken file need not be equal."""
    generator = np.random.default_rng(len(kind.name) + kind.num_bytes)
    blocks = generator.integers(0, 256, (num_blocks, kind.num_bytes), np.uint8)
    scales = generator.normal(0, 0.01, (num_blocks, 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        blocks[:, 208:210] = scales[:, :2]
    else:
        has_two = kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
        blocks[:, : 4 if has_two else 2] = scales[:, : 4 if has_two else 2]

    return blocks


def theirs(blocks: np.ndarray, kind: TensorType) -> np.ndarray:
    numbers: np.ndarray = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])
    return numbers.reshape(-1)


@pytest.mark.parametrize("kind", WITH_BLOCKS, ids=lambda kind: kind.name)
def test_random_blocks_have_the_numbers_that_ggml_gives_them(kind: TensorType) -> None:
    blocks = random_blocks(kind, 1000)
    our_values = dequantise(blocks.reshape(-1), kind)
    assert our_values.dtype == np.float32
    assert np.array_equal(our_values.view(np.uint32), theirs(blocks, kind).view(np.uint32))


def test_what_is_read_in_parts_is_what_is_read_at_once() -> None:
    kind = next(kind for kind in WITH_BLOCKS if kind.name == "Q5_1")
    blocks = random_blocks(kind, BLOCKS_AT_A_TIME + 3)
    assert np.array_equal(dequantise(blocks.reshape(-1), kind), theirs(blocks, kind))


def test_every_type_with_blocks_has_its_numbers_and_the_sizes_of_ggml() -> None:
    assert {kind.name for kind in (*WITH_BLOCKS, ZERO4, ZERO8)} == DEQUANTISE.keys()
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.num_elements, kind.num_bytes)
