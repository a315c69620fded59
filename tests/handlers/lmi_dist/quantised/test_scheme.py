"""What `quantization_config` says is read, or refused in one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handlers.lmi_dist.config_file import check
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.quantised.scheme import Layout, Scheme, read_scheme
from lmi.errors import ModelUnusable
from tests.tiny_models import tiny_model

FILE = Path("config.json")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def compressed(more: dict[str, Any] | None = None, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights}
    return COMPRESSED | {"config_groups": {"group_0": group}} | (more or {})


def scheme_of(quantization: object) -> Scheme | None:
    return read_scheme(FILE, {"quantization_config": quantization})


READ = {
    "awq": (AWQ, Scheme(Layout.AWQ, 4, 128)),
    "the first names of awq": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
        Scheme(Layout.AWQ, 4, 64),
    ),
    "awq of gptqmodel": (AWQ | {"format": "gemm"}, Scheme(Layout.AWQ, 4, 128)),
    "gptq": (GPTQ, Scheme(Layout.GPTQ, 4, 128)),
    "gptq, whole rows": (GPTQ | {"group_size": -1}, Scheme(Layout.GPTQ, 4, None)),
    "gptq, ordered": (
        GPTQ | {"desc_act": True, "bits": 8},
        Scheme(Layout.GPTQ, 8, 128, has_order=True),
    ),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, Scheme(Layout.GPTQ_V2, 4, 128)),
    "gptq, some modules not": (
        GPTQ | {"dynamic": {"-:.*down.*": {}}},
        Scheme(Layout.GPTQ, 4, 128),
    ),
    "packed": (COMPRESSED, Scheme(Layout.PACKED, 4, 128, has_zero_points=False)),
    "packed, zero points": (compressed(symmetric=False), Scheme(Layout.PACKED, 4, 128)),
    "packed, whole rows": (
        compressed(strategy="channel", group_size=None),
        Scheme(Layout.PACKED, 4, None, has_zero_points=False),
    ),
    "packed, no strategy": (
        compressed(strategy=None, group_size=-1),
        Scheme(Layout.PACKED, 4, None, has_zero_points=False),
    ),
    "packed, ordered": (
        compressed(actorder="group"),
        Scheme(Layout.PACKED, 4, 128, has_zero_points=False, has_order=True),
    ),
    "packed, ordered while it was made": (
        compressed(actorder="static"),
        Scheme(Layout.PACKED, 4, 128, has_zero_points=False),
    ),
    "integers": (
        compressed({"format": "int-quantized"}, num_bits=8, strategy="channel"),
        Scheme(Layout.INTEGERS, 8, None, has_zero_points=False),
    ),
    "integers, one scale": (
        compressed({"format": "int-quantized"}, num_bits=8, strategy=None, group_size=None),
        Scheme(Layout.INTEGERS, 8, None, is_of_tensor=True, has_zero_points=False),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_scheme_is_read(name: str) -> None:
    quantization, scheme = READ[name]
    assert scheme_of(quantization) == scheme


@pytest.mark.parametrize("quantization", [None, [], "awq", 4])
def test_what_is_no_object_says_nothing(quantization: object) -> None:
    assert scheme_of(quantization) is None


TWO_GROUPS = {
    "group_0": {"targets": ["Linear"], "weights": WEIGHTS},
    "group_1": {"targets": ["re:.*down.*"], "weights": WEIGHTS | {"num_bits": 8}},
}
OF_FLOATS = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "format": "float-quantized"}}
# By what is said of them
NOT_READ = {
    "null": {},
    "'fp8'": {"quant_method": "fp8"},
    "'mxfp4'": {"quant_method": "mxfp4"},
    "'bitsandbytes'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "'auto-round'": {"quant_method": "auto-round", "bits": 4},
    "a list of 1": {"quant_method": ["awq"]},
    "awq, version 'gemv'": AWQ | {"version": "gemv"},
    "awq, version 'gemv_fast'": AWQ | {"version": "GEMV_FAST"},
    "awq, version 'marlin'": AWQ | {"version": "marlin"},
    "awq of 3 bits": AWQ | {"bits": 3},
    "awq of 8 bits": AWQ | {"bits": 8},
    "gptq of 2 bits": GPTQ | {"bits": 2},
    "gptq of 3 bits": GPTQ | {"bits": 3},
    "gptq, checkpoint_format 'marlin'": GPTQ | {"checkpoint_format": "marlin"},
    "gptq, checkpoint_format 'gptq_p'": GPTQ | {"checkpoint_format": "gptq_p"},
    "gptq, pack_dtype 'int64'": GPTQ | {"pack_dtype": "int64"},
    "gptq, dynamic '+:.*up.*'": GPTQ | {"dynamic": {"-:a": {}, "+:.*up.*": {"bits": 8}}},
    "gptq with an adapter": GPTQ | {"adapter": {"name": "lora"}},
    "compressed-tensors, format 'none'": {"quant_method": "compressed-tensors"},
    "compressed-tensors, format 'float-quantized'": COMPRESSED | {"format": "float-quantized"},
    "compressed-tensors, format 'nvfp4-pack-quantized'": (
        COMPRESSED | {"format": "nvfp4-pack-quantized"}
    ),
    "compressed-tensors, format 'mxfp4-pack-quantized'": (
        COMPRESSED | {"format": "mxfp4-pack-quantized"}
    ),
    "compressed-tensors, format 'mixed-precision'": COMPRESSED | {"format": "mixed-precision"},
    "compressed-tensors, format 'naive-quantized'": COMPRESSED | {"format": "naive-quantized"},
    "compressed-tensors, config_groups of different weights": (
        COMPRESSED | {"config_groups": TWO_GROUPS}
    ),
    "compressed-tensors, weights of type 'float'": compressed(type="float"),
    "compressed-tensors, strategy 'block'": compressed(strategy="block"),
    "compressed-tensors, strategy 'tensor'": compressed(strategy="tensor"),
    "compressed-tensors of 3 bits": compressed(num_bits=3),
    "compressed-tensors, quantization_status 'frozen'": (
        COMPRESSED | {"quantization_status": "frozen"}
    ),
    "compressed-tensors, sparsity_config 'sparse-24-bitmask'": (
        COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    ),
    "compressed-tensors with a transform_config": (
        COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}
    ),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ModelUnusable) as refusal:
        scheme_of(NOT_READ[name])

    assert str(refusal.value) == (
        f"config.json: its weights are quantised already (quantization_config: {name}), "
        "which lmi-dist does not read; option.rolling_batch=vllm does"
    )


def test_a_group_of_another_format_is_refused_by_its_name() -> None:
    with pytest.raises(ModelUnusable, match="compressed-tensors, format 'float-quantized'"):
        scheme_of(COMPRESSED | {"config_groups": OF_FLOATS})


SIZES = "-1 or a whole number from 1 to 1048576"
BROKEN = {
    "a group of none": (AWQ | {"group_size": 0}, f"group_size must be {SIZES}, given 0"),
    "a group of less": (GPTQ | {"group_size": -2}, f"group_size must be {SIZES}, given -2"),
    "a huge group": (GPTQ | {"group_size": 1 << 40}, f"group_size must be {SIZES}, given"),
    "a group of a text": (GPTQ | {"group_size": "64"}, f"group_size must be {SIZES}, given '64'"),
    "a group of true": (GPTQ | {"group_size": True}, f"group_size must be {SIZES}, given true"),
    "no group": ({"quant_method": "awq", "bits": 4}, f"group_size must be {SIZES}, given null"),
    "another name of a group": (
        {"quant_method": "awq", "bits": 4, "q_group_size": 1.5},
        f"q_group_size must be {SIZES}, given 1.5",
    ),
    "no bits": ({"quant_method": "gptq", "group_size": 32}, "bits must be a whole number, given"),
    "bits of a text": (GPTQ | {"bits": "4"}, "bits must be a whole number, given '4'"),
    "bits of true": (GPTQ | {"bits": True}, "bits must be a whole number, given true"),
    "a version of a number": (AWQ | {"version": 1}, "version must be a text, given 1"),
    "an order of a number": (GPTQ | {"desc_act": 1}, "desc_act must be true or false, given 1"),
    "dynamic of a list": (GPTQ | {"dynamic": []}, "dynamic must be an object, given a list of 0"),
    "no groups": (
        COMPRESSED | {"config_groups": {}},
        "config_groups must be an object with a group, given an object of 0",
    ),
    "groups in a list": (
        COMPRESSED | {"config_groups": [1]},
        "config_groups must be an object, given a list of 1",
    ),
    "a group of a list": (
        COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}},
        "config_groups.W4A16 must be an object, given a list of 1",
    ),
    "a group without a size": (
        compressed(group_size=None),
        f"config_groups.group_0.weights.group_size must be {SIZES}, given null",
    ),
    "a group of -3": (
        compressed(group_size=-3),
        f"config_groups.group_0.weights.group_size must be {SIZES}, given -3",
    ),
    "symmetric by a text": (
        compressed(symmetric="yes"),
        "config_groups.group_0.weights.symmetric must be true or false, given 'yes'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_field_that_breaks_its_rule_is_named_with_the_rule_and_its_value(name: str) -> None:
    quantization, fault = BROKEN[name]
    with pytest.raises(ModelUnusable) as error:
        scheme_of(quantization)

    assert str(error.value).startswith(f"config.json: quantization_config.{fault}")
    assert "\n" not in str(error.value)


def quantised_config(folder: Path, family: str) -> Path:
    config = json.loads((tiny_model(family) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    return folder


def test_a_family_that_runs_through_transformers_is_refused(tmp_path: Path) -> None:
    folder = quantised_config(tmp_path, "olmo2")
    fault = "quantization_config: of Olmo2ForCausalLM, which runs through the modules"
    with pytest.raises(ModelUnusable, match=fault):
        check(folder)

    with pytest.raises(ModelUnusable, match=fault):
        read_facts(str(folder))


def test_a_family_of_our_own_passes(tmp_path: Path) -> None:
    check(quantised_config(tmp_path, "llama"))
