"""Make `samples.safetensors`: small linears that the makers' own libraries have quantised, packed
and unpacked again.

It was run with gptqmodel 7.7.0 and compressed-tensors 0.17.0, which the tests do not need:

    python -m tests.handlers.lmi_dist.quantised.make_samples

Each sample has the parts of its linear as a checkpoint has them, some rows of its `floats` by the
maker's library in float16, and in the file's metadata `quantization_config` as the library writes
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = Path(__file__).with_name("samples.safetensors")
NUM_OUT = 32
NUM_IN = 64
GROUP_SIZE = 32
# The file has the floats of one row in so many
ROW_STEP = 3

Sample = tuple[dict[str, Any], dict[str, Tensor]]


def main() -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    configs: dict[str, str] = {}
    for name, (config, parts) in {
        **gptq_samples(),
        **awq_samples(),
        **compressed_samples(),
    }.items():
        configs[name] = json.dumps(config)
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        tensors[f"{name}.floats"] = parts["floats"][::ROW_STEP].contiguous()

    save_file(tensors, SAMPLES, metadata=configs)
    print(f"{SAMPLES}: {SAMPLES.stat().st_size:,} bytes of {len(configs)} samples")


def linear() -> nn.Linear:
    torch.manual_seed(1)
    module = nn.Linear(NUM_IN, NUM_OUT, bias=False).requires_grad_(False)
    # Two rows have no number below zero, so that their zero point is 0
    module.weight[3:5].abs_()
    return module


def scales_and_zeros(
    weight: Tensor, groups: Tensor, num_bits: int, *, is_symmetric: bool
) -> tuple[Tensor, Tensor]:
    """(NUM_OUT, num_groups) both, scales in float16."""
    top = 2**num_bits - 1
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    for group in range(int(groups.max()) + 1):
        members = weight[:, groups == group]
        low = members.amin(1).clamp(max=0)
        high = members.amax(1).clamp(min=0)
        if is_symmetric:
            scale = torch.maximum(high, -low) * 2 / top
            zero = torch.full_like(scale, (top + 1) // 2)
        else:
            scale = (high - low) / top
            zero = (-low / scale).round()

        scales.append(scale.half().float())
        zeros.append(zero)

    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq_samples() -> dict[str, Sample]:
    samples: dict[str, Sample] = {}
    for layout in ("gptq", "gptq_v2"):
        samples[f"{layout}_4"] = gptq_sample(layout, 4)
        samples[f"{layout}_8"] = gptq_sample(layout, 8, is_symmetric=True)
        samples[f"{layout}_4_order"] = gptq_sample(layout, 4, has_order=True)

    return samples


def gptq_sample(
    layout: str, num_bits: int, *, is_symmetric: bool = False, has_order: bool = False
) -> Sample:
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    config = QuantizeConfig(
        bits=num_bits,
        group_size=GROUP_SIZE,
        desc_act=has_order,
        sym=is_symmetric,
        format=layout,
    )
    module = linear()
    places = torch.randperm(NUM_IN) if has_order else torch.arange(NUM_IN)
    groups = places // GROUP_SIZE
    scales, zeros = scales_and_zeros(module.weight, groups, num_bits, is_symmetric=is_symmetric)
    packed = TorchLinear(
        bits=num_bits,
        group_size=GROUP_SIZE,
        sym=is_symmetric,
        desc_act=has_order,
        in_features=NUM_IN,
        out_features=NUM_OUT,
        bias=False,
        register_buffers=True,
    )
    packed.pack_original(module, scales, zeros, groups.int())
    packed.post_init()
    floats = packed.dequantize_weight().T.half()
    if layout == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, config)

    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return written_config(config), {**parts, "floats": floats}


def awq_samples() -> dict[str, Sample]:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.quantization.config import AWQConfig

    config = AWQConfig(bits=4, group_size=GROUP_SIZE, sym=False, format="gemm")
    module = linear()
    groups = torch.arange(NUM_IN) // GROUP_SIZE
    scales, zeros = scales_and_zeros(module.weight, groups, 4, is_symmetric=False)
    packed = AwqTorchLinear(
        bits=4,
        group_size=GROUP_SIZE,
        sym=False,
        desc_act=False,
        in_features=NUM_IN,
        out_features=NUM_OUT,
        bias=False,
        register_buffers=False,
    )
    packed.pack(module, scales.half(), zeros)
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    floats = dequantize_gemm(**parts, bits=4, group_size=GROUP_SIZE).T
    return {"awq": (written_config(config), {**parts, "floats": floats})}


def written_config(config: Any) -> dict[str, Any]:
    """The configuration without the folder that was used."""
    values: dict[str, Any] = config.to_dict()
    del values["meta"]["offload_to_disk_path"]
    return values


def compressed_samples() -> dict[str, Sample]:
    return {
        "packed_4": compressed_sample("pack-quantized", 4, symmetric=False, group_size=GROUP_SIZE),
        "packed_4_order": compressed_sample(
            "pack-quantized", 4, symmetric=True, group_size=GROUP_SIZE, actorder="group"
        ),
        "packed_8": compressed_sample("pack-quantized", 8, symmetric=True, strategy="channel"),
        "packed_8_zeros": compressed_sample(
            "pack-quantized", 8, symmetric=False, group_size=GROUP_SIZE
        ),
        "integers": compressed_sample("int-quantized", 8, symmetric=True, strategy="channel"),
        "integers_zeros": compressed_sample(
            "int-quantized", 8, symmetric=False, strategy="channel"
        ),
    }


def compressed_sample(layout: str, num_bits: int, **settings: Any) -> Sample:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    args = QuantizationArgs(num_bits=num_bits, type="int", **settings)
    activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=activations if layout == "int-quantized" else None,
        format=layout,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=layout,
        quantization_status="compressed",
        ignore=["lm_head"],
    )

    weight = linear().weight
    size = args.group_size or NUM_IN
    places = torch.randperm(NUM_IN) if args.actorder else torch.arange(NUM_IN)
    groups = places // size
    scales, zeros = scales_and_zeros(weight, groups, num_bits, is_symmetric=args.symmetric)
    state = {"weight": weight, "weight_scale": scales.half()}
    if not args.symmetric:
        state["weight_zero_point"] = (zeros - 2 ** (num_bits - 1)).to(torch.int8)

    if args.actorder:
        state["weight_g_idx"] = groups.int()

    compressor = BaseCompressor.load_from_registry(layout)
    parts = compressor.compress(state, scheme)
    floats = compressor.decompress(parts, scheme)["weight"]
    return config.model_dump(mode="json"), {**parts, "floats": floats}


if __name__ == "__main__":
    main()
