"""Tensors of a quantised checkpoint that do not fit together are one line with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.memory import need_of
from lmi.errors import ModelUnusable
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import load_native
from tests.quantised_models import WEIGHTS, Arrays, Variant, quantised_model

PATH = "model.layers.0.self_attn.q_proj"
# (128, 96) in groups of 32
AWQ = Variant("gemm")
GPTQ = Variant("gptq", order="inputs")
NEIGHBOURS = Variant("gptq")
PACKED = Variant("pack-quantized", order="inputs")
INTEGERS = Variant("int-quantized", 8, -1)
OF_TENSOR = Variant("int-quantized", 8, -1, is_symmetric=True, is_of_tensor=True)

Harm = Callable[[Arrays], object]


def without(part: str) -> Harm:
    return lambda tensors: tensors.pop(f"{PATH}.{part}")


def cut(part: str, *sizes: int) -> Harm:
    """Leave the first numbers of each dimension."""

    def harm(tensors: Arrays) -> None:
        name = f"{PATH}.{part}"
        tensors[name] = tensors[name][tuple(slice(size) for size in sizes)].copy()

    return harm


def put(part: str, array: np.ndarray) -> Harm:
    return lambda tensors: tensors.update({f"{PATH}.{part}": array})


def with_group(group: int) -> Harm:
    def harm(tensors: Arrays) -> None:
        tensors[f"{PATH}.g_idx"][40] = group

    return harm


FAULTS: dict[str, tuple[Variant, Harm, str]] = {
    "awq without numbers": (AWQ, without("qweight"), "its part qweight is missing"),
    "awq without zero points": (AWQ, without("qzeros"), "its part qzeros is missing"),
    "awq without scales": (AWQ, without("scales"), "its part scales is missing"),
    "awq of too few groups": (
        AWQ,
        cut("scales", 2),
        "its part scales has shape (2, 128), the others need (3, 128)",
    ),
    "awq of too few outputs": (
        AWQ,
        cut("qweight", 96, 8),
        "its part scales has shape (3, 128), the others need (3, 64)",
    ),
    "awq of too few inputs": (
        AWQ,
        cut("qweight", 80),
        "has shape (128, 80), config.json needs (128, 96)",
    ),
    "awq of other zero points": (
        AWQ,
        cut("qzeros", 3, 15),
        "its part qzeros has shape (3, 15), the others need (3, 16)",
    ),
    "awq in another dtype": (
        AWQ,
        put("qweight", np.zeros((96, 16), np.int64)),
        "its part qweight must be int32, given int64",
    ),
    "awq of one dimension": (
        AWQ,
        put("qweight", np.zeros(96, np.int32)),
        "its part qweight must be a matrix, given shape (96,)",
    ),
    "awq of nothing": (
        AWQ,
        put("qweight", np.zeros((0, 0), np.int32)),
        "its part scales has shape (3, 128), the others need (0, 0)",
    ),
    "awq with whole numbers as scales": (
        AWQ,
        put("scales", np.zeros((3, 128), np.int32)),
        "its part scales must be floats, given int32",
    ),
    "gptq without an order": (GPTQ, without("g_idx"), "its part g_idx is missing"),
    "gptq without scales": (NEIGHBOURS, without("scales"), "its part scales is missing"),
    "gptq of a group below": (
        GPTQ,
        with_group(-1),
        "its part g_idx must be groups from 0 to 2, given -1 to 2",
    ),
    "gptq of a group above": (
        NEIGHBOURS,
        with_group(3),
        "its part g_idx must be groups from 0 to 2, given 0 to 3",
    ),
    "gptq of too few inputs in order": (
        GPTQ,
        cut("g_idx", 95),
        "its part g_idx has shape (95,), the others need (96,)",
    ),
    "gptq with floats as groups": (
        GPTQ,
        put("g_idx", np.zeros(96, np.float32)),
        "its part g_idx must be int32 or int64, given float32",
    ),
    "gptq of other zero points": (
        NEIGHBOURS,
        put("qzeros", np.zeros((1, 16), np.int32)),
        "its part qzeros has shape (1, 16), the others need (3, 16)",
    ),
    "packed without a shape": (
        PACKED,
        without("weight_shape"),
        "its part weight_shape is missing",
    ),
    "packed of another shape": (
        PACKED,
        put("weight_shape", np.array([128, 97])),
        "its part weight_shape is [128, 97], weight_packed has (128, 12) words",
    ),
    "packed of a huge shape": (
        PACKED,
        put("weight_shape", np.array([1 << 62, 1 << 62])),
        "its part weight_shape is [4611686018427387904, 4611686018427387904], weight_packed has",
    ),
    "packed of less than nothing": (
        PACKED,
        put("weight_shape", np.array([128, -96])),
        "its part weight_shape is [128, -96], weight_packed has",
    ),
    "packed of one size": (
        PACKED,
        put("weight_shape", np.array([128])),
        "its part weight_shape is [128], weight_packed has",
    ),
    "packed without numbers": (
        PACKED,
        without("weight_packed"),
        "its part weight_packed is missing",
    ),
    "packed without zero points": (
        PACKED,
        without("weight_zero_point"),
        "its part weight_zero_point is missing",
    ),
    "packed without an order": (
        PACKED,
        without("weight_g_idx"),
        "its part weight_g_idx is missing",
    ),
    "packed of too few zero points": (
        PACKED,
        cut("weight_zero_point", 15),
        "its part weight_zero_point has shape (15, 3), the others need (16, 3)",
    ),
    "integers without numbers": (INTEGERS, without("weight"), "its part weight is missing"),
    "integers without zero points": (
        INTEGERS,
        without("weight_zero_point"),
        "its part weight_zero_point is missing",
    ),
    "integers of other zero points": (
        INTEGERS,
        cut("weight_zero_point", 100),
        "its part weight_zero_point has shape (100, 1), the others need (128, 1)",
    ),
    "integers of too few scales": (
        INTEGERS,
        cut("weight_scale", 100),
        "its part weight_scale has shape (100, 1), the others need (128, 1)",
    ),
    "integers in another dtype": (
        INTEGERS,
        put("weight", np.zeros((128, 96), np.float32)),
        "its part weight must be int8, given float32",
    ),
    "integers of many scales for a tensor": (
        OF_TENSOR,
        put("weight_scale", np.ones(128, np.float32)),
        "its part weight_scale has shape (128,), a tensor has one scale",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_together_are_one_line(tmp_path: Path, name: str) -> None:
    variant, harm, fault = FAULTS[name]
    quantised, _ = quantised_model(tmp_path, variant)
    tensors = load_file(quantised / WEIGHTS)
    harm(tensors)
    save_file(tensors, quantised / WEIGHTS)
    with pytest.raises(ModelUnusable) as error:
        load_native(quantised, max_length=64)

    message = str(error.value)
    assert f"{quantised / WEIGHTS}: tensor {PATH}.weight " in message
    assert fault in message
    assert "\n" not in message

    # The estimate of memory reads the same parts, before the load
    if "config.json needs" not in fault:
        with pytest.raises(ModelUnusable) as error:
            need_of(read_facts(str(quantised)), EngineConfig(), lambda dtype, shape: 4)

        assert fault in str(error.value)
