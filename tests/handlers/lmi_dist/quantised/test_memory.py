"""What a quantised checkpoint needs is known before it is read: its bits, and scales with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.memory import need_of
from handlers.lmi_dist.native.library import load
from handlers.lmi_dist.native.records import Panels
from handlers.lmi_dist.native_runner import NativeRunner, block_bytes, bytes_of_file, weight_bytes
from handlers.lmi_dist.operations import Linear
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import load_native
from tests.quantised_models import Variant, quantised_model

MAX_LENGTH = 64
# Of the estimate in what is packed. int8 takes whole groups of 64, and these rows have 96 or 112.
MIN_SHARE = 0.75
MAX_SHARE = 1.1


def packed_bytes(runner: NativeRunner) -> int:
    """The bytes of all linears as the kernels read them."""
    panels: list[Panels] = []
    for operation in runner.program.operations:
        if isinstance(operation, Linear):
            panels.append(operation.weight)
            if operation.gate is not None:
                panels.append(operation.gate)

    return sum(part.memory.nbytes for part in panels)


def estimate(folder: Path, config: EngineConfig) -> int:
    """Without cosines and sines."""
    facts = read_facts(str(folder))

    assert bytes_of_file(load(), config, facts.path) is None

    need = need_of(
        facts,
        config,
        partial(weight_bytes, facts, config),
        bytes_of_blocks=block_bytes(load(), config),
    )
    architecture = facts.architecture

    assert architecture is not None and architecture.rotaries[0] is not None

    num_rotated = len(architecture.rotaries[0].frequencies)
    return need.weights - facts.context_length * num_rotated * 8


@pytest.mark.parametrize(
    "variant",
    [
        Variant("gemm"),
        Variant("gptq", order="inputs"),
        Variant("gptq", num_bits=8, is_symmetric=True),
        Variant("gptq", has_head=True),
        Variant("pack-quantized", num_bits=8),
        Variant("int-quantized", 8, -1, is_symmetric=True),
    ],
    ids=lambda variant: f"{variant.layout}, {variant.num_bits}, {variant.order}",
)
@pytest.mark.parametrize(
    "config",
    [EngineConfig(), EngineConfig(dtype="fp32"), EngineConfig(quantize="int8")],
    ids=["as it is", "float32", "int8"],
)
def test_the_memory_of_a_quantised_checkpoint_is_known_before_it_is_read(
    tmp_path: Path, variant: Variant, config: EngineConfig
) -> None:
    quantised, _ = quantised_model(tmp_path, variant)
    found = packed_bytes(load_native(quantised, config, max_length=MAX_LENGTH))
    share = estimate(quantised, config) / found
    print(f"{variant.layout}: {share:.2f}")
    assert MIN_SHARE <= share <= MAX_SHARE


def test_four_bits_take_less_memory_than_float32(tmp_path: Path) -> None:
    quantised, floats = quantised_model(tmp_path, Variant("gptq", has_head=True), "llama_deep")
    assert estimate(quantised, EngineConfig()) < 0.4 * estimate(floats, EngineConfig())
