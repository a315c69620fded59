"""The program of every family: run by a plain interpreter, it gives the logits of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from handlers.lmi_dist.arrays import BFLOAT16, Array
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.operations import Attend, Embed, Gather, Linear
from handlers.lmi_dist.program import load
from lmi.errors import ModelUnusable
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.whole_sequence import read_program, run
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

OURS = [family for family in FAMILIES if family not in ("olmo2", "olmo2_tied", "llama_deep")]
# Longer than every window
IDS = [(7 * index + 3) % VOCAB_SIZE for index in range(150)]


@torch.inference_mode()
def transformers_logits(path: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", OURS)
def test_the_program_of_a_family_gives_the_logits_of_transformers(family: str) -> None:
    expected = transformers_logits(tiny_model(family), IDS, torch.float32)
    actual = run(read_program(str(tiny_model(family)), 400), IDS, list(range(len(IDS))))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi", "opt_post_norm"])
def test_logits_are_computed_only_where_they_are_wanted(family: str) -> None:
    program = read_program(str(tiny_model(family)), 400)
    everywhere = run(program, IDS, list(range(len(IDS))))
    some = run(program, IDS, [3, 77, 149])
    torch.testing.assert_close(some, everywhere[[3, 77, 149]], rtol=0, atol=1e-4)


def test_of_the_last_layer_only_keys_and_values_are_computed_for_every_token() -> None:
    program = read_program(str(tiny_model("phi")), 400)
    attends = [operation for operation in program.operations if isinstance(operation, Attend)]
    assert [(operation.layer, operation.is_wanted) for operation in attends] == [
        (0, False),
        (1, True),
    ]
    after = program.operations[program.operations.index(attends[-1]) :]
    # The residual, and what both blocks read
    assert sum(isinstance(operation, Gather) for operation in after) == 2
    assert {
        operation.output for operation in after if isinstance(operation, Linear | Gather | Attend)
    } <= program.wanted


def test_weights_are_packed_as_they_are_in_the_file_each_once(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "model"))
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    facts = read_facts(str(folder))
    packed = list[Array]()
    program = load(facts, EngineConfig(), 400, lambda *_: None, packed.append)

    # Head; qkv, o, up, gate, down
    assert len(packed) == 1 + facts.num_layers * 5
    assert {packed_tensor.dtype for packed_tensor in packed} == {BFLOAT16}

    embed = program.operations[0]
    qkv = program.operations[2]

    assert isinstance(embed, Embed) and embed.table.dtype == BFLOAT16
    assert isinstance(qkv, Linear) and qkv.bias is not None and qkv.bias.dtype.name == "float32"


def test_a_checkpoint_without_the_first_word_of_its_names_is_read(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    expected = run(read_program(str(tiny_model("llama")), 400), IDS, [149])
    actual = run(read_program(str(folder), 400), IDS, [149])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_a_tensor_that_is_missing_or_has_another_shape_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 5)}, folder / "model.safetensors")
    with pytest.raises(
        ModelUnusable, match=rf"{name} has shape \(3, 5\), config.json needs \(96, 112\)"
    ):
        read_program(str(folder), 400)

    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelUnusable, match=f"{name} is missing"):
        read_program(str(folder), 400)
