"""A quantised checkpoint answers as the model of the floats that its numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from handlers.lmi_dist.native_runner import NativeRunner
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.weights import INDEX
from lmi.errors import ModelUnusable
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.lmi_dist.play import forward, load_native, load_runner, table_of
from tests.quantised_models import CONFIG, WEIGHTS, Variant, quantised_model
from tests.tiny_models import VOCAB_SIZE

MAX_LENGTH = 128
IN_FLOAT32 = EngineConfig(dtype="fp32")
IDS = torch.randint(3, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(1)).tolist()
# Of a log-prob, where blocks hold the same numbers: inputs are rounded to 16 bits.
MAX_DIFFERENCE = 0.01

EIGHT = "8-bit blocks"
FLOATS = "float32"
VARIANTS = {
    "awq": Variant("gemm"),
    "awq, 64": Variant("gemm", group_size=64),
    "awq, 128": Variant("gemm", group_size=128),
    "awq, whole rows": Variant("gemm", group_size=-1),
    "awq, groups of no whole blocks": Variant("gemm", group_size=16, dtype=FLOATS),
    "awq, symmetric": Variant("gemm", is_symmetric=True, more={"zero_point": False}),
    "gptq": Variant("gptq"),
    "gptq, 64": Variant("gptq", group_size=64),
    "gptq, 128": Variant("gptq", group_size=128),
    "gptq, whole rows": Variant("gptq", group_size=-1),
    "gptq, symmetric": Variant("gptq", is_symmetric=True),
    "gptq, ordered": Variant("gptq", order="inputs", dtype=FLOATS),
    "gptq, ordered by blocks": Variant("gptq", order="blocks"),
    "gptq, the head too": Variant("gptq", has_head=True),
    "gptq, 8 bits": Variant("gptq", num_bits=8, dtype=EIGHT),
    "gptq, 8 bits, symmetric": Variant("gptq", num_bits=8, is_symmetric=True, dtype=EIGHT),
    "gptq, 8 bits, ordered": Variant("gptq", 8, 64, True, order="inputs", dtype=FLOATS),
    "gptq v2": Variant("gptq_v2"),
    "gptq v2, symmetric": Variant("gptq_v2", is_symmetric=True),
    "gptq v2, ordered": Variant("gptq_v2", order="inputs", dtype=FLOATS),
    "gptq v2, 8 bits": Variant("gptq_v2", num_bits=8, dtype=EIGHT),
    "gptq v2, 8 bits, symmetric": Variant("gptq_v2", 8, 128, is_symmetric=True, dtype=EIGHT),
    "packed": Variant("pack-quantized"),
    "packed, bf16": Variant("pack-quantized", scale_dtype=torch.bfloat16),
    "packed, float32": Variant("pack-quantized", scale_dtype=torch.float32),
    "packed, symmetric": Variant("pack-quantized", group_size=128, is_symmetric=True),
    "packed, whole rows": Variant("pack-quantized", group_size=-1),
    "packed, ordered": Variant("pack-quantized", order="inputs", dtype=FLOATS),
    "packed, 8 bits": Variant("pack-quantized", num_bits=8, dtype=EIGHT),
    "packed, 8 bits, symmetric": Variant("pack-quantized", 8, 64, is_symmetric=True, dtype=EIGHT),
    "packed, 8 bits, whole rows": Variant("pack-quantized", 8, -1, is_symmetric=True, dtype=EIGHT),
    "integers": Variant("int-quantized", 8, -1, is_symmetric=True, dtype=EIGHT),
    "integers, bf16": Variant(
        "int-quantized", 8, -1, is_symmetric=True, scale_dtype=torch.bfloat16, dtype=EIGHT
    ),
    "integers, zero points": Variant("int-quantized", 8, -1, dtype=EIGHT),
    "integers, one scale": Variant(
        "int-quantized", 8, -1, is_symmetric=True, is_of_tensor=True, dtype=EIGHT
    ),
    "integers, groups": Variant("int-quantized", 8, 32, is_symmetric=True, dtype=EIGHT),
    "integers, 4 bits": Variant("int-quantized", 4, 32, is_symmetric=True, dtype=EIGHT),
}
GPTQ_IN_ORDER = VARIANTS["gptq, ordered"]
OF_ACTIVATIONS = VARIANTS["integers"]


def logits_of(runner: Runner, cuts: tuple[int, ...] = (), adapter: int = 0) -> Tensor:
    """Of every token, in chunks that end at `cuts`."""
    table = table_of(0, MAX_LENGTH) if isinstance(runner, NativeRunner) else []
    rows: list[Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, len(IDS)), strict=True):
        chunk = Chunk(0, start, IDS[start:end], end - start, table, adapter=adapter)
        rows.append(forward(runner, Plan([], [chunk])))

    return torch.cat(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_quantised_checkpoint_answers_as_its_floats(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    quantised, floats = quantised_model(tmp_path, variant)
    expected = logits_of(load_native(floats, IN_FLOAT32, max_length=MAX_LENGTH))
    exact = load_native(quantised, IN_FLOAT32, max_length=MAX_LENGTH)
    assert exact.dtype == "float32"
    assert torch.equal(logits_of(exact), expected)

    runner = load_native(quantised, max_length=MAX_LENGTH)
    assert runner.dtype == variant.dtype
    found = logits_of(runner)
    assert torch.equal(logits_of(runner, cuts=(1, 33, 90)), found)

    difference = float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max())
    print(f"{name}: log-probs differ by {difference:.5f}")
    if variant.dtype == FLOATS:
        assert difference == 0
    else:
        assert difference <= MAX_DIFFERENCE


@pytest.mark.parametrize("name", ["awq", "gptq, ordered", "packed, 8 bits", "integers"])
def test_torch_computes_with_the_floats_of_a_quantised_checkpoint(
    tmp_path: Path, name: str
) -> None:
    quantised, floats = quantised_model(tmp_path, VARIANTS[name])
    found, expected = (
        logits_of(load_runner(folder, IN_FLOAT32, num_slots=2, max_length=MAX_LENGTH))
        for folder in (quantised, floats)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "phi3", "gpt2", "opt"])
def test_every_family_reads_its_quantised_linears(tmp_path: Path, family: str) -> None:
    """Those that are joined in the file, turned round or tied, too."""
    quantised, floats = quantised_model(tmp_path, Variant("gptq", is_symmetric=True), family)
    expected = logits_of(load_native(floats, IN_FLOAT32, max_length=MAX_LENGTH))
    exact = load_native(quantised, IN_FLOAT32, max_length=MAX_LENGTH)
    assert torch.equal(logits_of(exact), expected)

    runner = load_native(quantised, max_length=MAX_LENGTH)
    assert runner.dtype == "4-bit blocks"
    difference = logits_of(runner).log_softmax(-1) - expected.log_softmax(-1)
    assert float(difference.abs().max()) <= MAX_DIFFERENCE


def test_an_adapter_adds_the_same_to_a_quantised_checkpoint(tmp_path: Path) -> None:
    quantised, floats = quantised_model(tmp_path, Variant("gptq", is_symmetric=True))
    adapter = peft_adapters.make(floats, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    options = {"enable_lora": "true"}

    def with_adapter(folder: Path, dtype: str) -> Tensor:
        config = EngineConfig(dtype=dtype, options=options)
        runner = load_native(folder, config, max_length=MAX_LENGTH)
        assert runner.adapters is not None
        runner.adapters.model.put_adapter(1, runner.adapters.read(str(adapter)))
        return logits_of(runner, adapter=1)

    expected = with_adapter(floats, "fp32")
    without = logits_of(load_native(floats, IN_FLOAT32, max_length=MAX_LENGTH))
    assert not torch.allclose(expected, without, atol=1)
    assert torch.equal(with_adapter(quantised, "fp32"), expected)

    kept = with_adapter(quantised, "auto").log_softmax(-1)
    assert float((kept - expected.log_softmax(-1)).abs().max()) <= MAX_DIFFERENCE


def test_a_load_uses_every_part_of_a_quantised_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shares: list[float] = []
    for name, variant in {"gptq": GPTQ_IN_ORDER, "int": OF_ACTIVATIONS}.items():
        quantised, _ = quantised_model(tmp_path / name, variant)
        tensors = load_file(quantised / WEIGHTS)
        if variant is OF_ACTIVATIONS:
            tensors["model.layers.0.mlp.up_proj.input_scale"] = np.ones(1, np.float32)
            save_file(tensors, quantised / WEIGHTS)

        load_native(
            quantised, max_length=MAX_LENGTH, progress=lambda stage, share: shares.append(share)
        )
        assert shares[-1] == 1.0

    assert "not used" not in caplog.text

    tensors["model.layers.7.mlp.up_proj.weight_scale"] = np.ones((1, 1), np.float32)
    save_file(tensors, quantised / WEIGHTS)
    load_native(quantised, max_length=MAX_LENGTH)
    assert "not used" in caplog.text
    assert "model.layers.7.mlp.up_proj.weight_scale" in caplog.text


def test_the_parts_of_a_weight_may_lie_in_several_files(tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, Variant("gemm"))
    expected = logits_of(load_native(quantised, max_length=MAX_LENGTH))
    tensors = load_file(quantised / WEIGHTS)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for file, part in {"a.safetensors": names[::2], "b.safetensors": names[1::2]}.items():
        save_file({name: tensors[name] for name in part}, quantised / file)
        weight_map |= dict.fromkeys(part, file)

    (quantised / WEIGHTS).unlink()
    (quantised / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(load_native(quantised, max_length=MAX_LENGTH)), expected)


def test_quantised_weights_that_are_pickled_are_refused(tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, Variant("gemm"))
    torch.save({}, quantised / "pytorch_model.bin")
    (quantised / WEIGHTS).unlink()
    with pytest.raises(ModelUnusable, match=r"config\.json: .* weights in no safetensors file"):
        load_native(quantised, EngineConfig(allow_pickle=True), max_length=MAX_LENGTH)


def test_an_option_quantises_the_floats_of_a_quantised_checkpoint_anew(tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, Variant("gemm"))
    runner = load_native(quantised, EngineConfig(quantize="int8"), max_length=MAX_LENGTH)
    assert runner.dtype == "int8"


def test_modules_that_stay_floats_are_read_as_floats(tmp_path: Path) -> None:
    """A pattern of `dynamic` that begins so names them, and the file has their weights."""
    variant = Variant("gptq", more={"dynamic": {"-:lm_head": {}}})
    quantised, floats = quantised_model(tmp_path, variant)
    expected = logits_of(load_native(floats, IN_FLOAT32, max_length=MAX_LENGTH))
    assert torch.equal(
        logits_of(load_native(quantised, IN_FLOAT32, max_length=MAX_LENGTH)), expected
    )


def test_a_quantised_checkpoint_that_says_no_more_than_it_must_is_read(tmp_path: Path) -> None:
    quantised, _ = quantised_model(tmp_path, Variant("gptq", group_size=-1))
    file = quantised / CONFIG
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    file.write_text(json.dumps(config))
    assert load_native(quantised, max_length=MAX_LENGTH).dtype == "4-bit blocks"
