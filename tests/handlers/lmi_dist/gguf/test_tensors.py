"""Tensors of a GGUF file are those of the checkpoint that it was made of, family by family."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from msgspec.structs import replace

from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.gguf.tensors import NAMES, GgufTensors
from handlers.lmi_dist.weights import Checkpoint, stored_dtype
from lmi.errors import ModelUnusable
from lmi.shared.gguf_file import read_model
from lmi.sources.gguf.config import FAMILIES, config_of
from tests.gguf_files import Written, floats, gemma3_file, smollm2_file, write_gguf
from tests.tiny_gguf import ARCHITECTURES, write_tiny_gguf
from tests.tiny_models import tiny_model

# Of what a file in float32 says of Llama 3's frequencies
ROTATION_ERROR = 1e-6
# Of the tensor of a real file
MAX_ROWS = 50_000


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = write_tiny_gguf(request.param, tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text(json.dumps(config_of(read_model(file))))
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "family"), [(family, family) for family in ARCHITECTURES], indirect=["folder"]
)
def test_a_file_has_the_architecture_and_the_tensors_of_its_checkpoint(
    folder: Path, family: str
) -> None:
    theirs = read_facts(str(tiny_model(family))).architecture
    our_architecture = read_facts(str(folder)).architecture
    assert theirs is not None and our_architecture is not None
    # Whose tiny checkpoints have a scale that no file can say
    if "gemma" in family:
        theirs = replace(theirs, scale=our_architecture.scale)
    for our_rotary, their_rotary in zip(our_architecture.rotaries, theirs.rotaries, strict=True):
        if our_rotary is not None and their_rotary is not None:
            assert our_rotary.frequencies == pytest.approx(
                their_rotary.frequencies, rel=ROTATION_ERROR
            )
            assert our_rotary.factor == their_rotary.factor
    assert replace(our_architecture, rotaries=()) == replace(theirs, rotaries=())

    checkpoint = Checkpoint(str(tiny_model(family)))
    tensors = GgufTensors(folder / "model.gguf")
    assert set(tensors) == set(checkpoint.files)
    for name, array in tensors.items():
        expected = checkpoint.read(name)
        # 1 was added to it, and rounded
        if "gemma" in family and "norm" in name:
            assert np.abs(array - expected).max() < 1e-7
        else:
            assert np.array_equal(array, expected), name


def test_every_family_has_names_and_a_configuration() -> None:
    assert NAMES.keys() == FAMILIES.keys() == set(ARCHITECTURES.values())


@pytest.mark.parametrize("real_file", [smollm2_file, gemma3_file])
def test_the_numbers_of_a_real_file_are_those_that_ggml_reads(real_file) -> None:  # type: ignore[no-untyped-def]
    file = real_file()
    our_tensors = GgufTensors(file)
    names = {tensor.stored.name: name for name, tensor in our_tensors._tensors.items()}
    stored = read_model(file).tensors
    data = np.memmap(file, np.uint8, "r")
    for name, tensor in stored.items():
        kind = gguf.GGMLQuantizationType[tensor.type.name]
        part = data[tensor.start : tensor.end]
        # Theirs takes ten seconds for the vocabulary of Gemma
        if tensor.shape[0] > MAX_ROWS:
            part = part.reshape(tensor.shape[0], -1)[:MAX_ROWS]
            rows = our_tensors.blocks_of(names[name])
            assert rows is not None and np.array_equal(
                rows[:MAX_ROWS].floats(), gguf.dequantize(part, kind)
            )
            continue

        expected = gguf.dequantize(part, kind).reshape(tensor.shape)
        array = our_tensors[names[name]]
        if "norm" in name and "gemma" in str(file):
            assert np.abs(array + 1 - expected).max() < 1e-6
        elif ".attn_q.weight" in name or ".attn_k.weight" in name and "Smol" in str(file):
            assert np.array_equal(np.sort(array.sum(axis=1)), np.sort(expected.sum(axis=1)))
        else:
            assert np.array_equal(array, expected), name


def metadata(**changes: object) -> dict[str, object]:
    usual = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
    }
    return usual | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general__architecture": "bert"}, "general.architecture must be one of llama, qwen2"),
        ({"general__architecture": 5}, "general.architecture must be a text, given 5"),
        ({"llama__block_count": 0}, "llama.block_count must be a whole number from 1"),
        ({"llama__block_count": "x"}, "llama.block_count must be a whole number from 1"),
        ({"llama__block_count": 1 << 31}, "llama.block_count must be a whole number from 1"),
        (
            {"llama__feed_forward_length": [64, 128]},
            "llama.feed_forward_length must be one number, layers that differ are not read here",
        ),
        ({"llama__rope__freq_base": -1.0}, "llama.rope.freq_base must be a number over 0"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base must be a number over 0"),
        ({"llama__rope__scaling__type": "new"}, "its metadata has no llama.rope.scaling.factor"),
        ({"llama__expert_count": 8}, "models with experts are not read from GGUF"),
        ({"llama__attention__causal": False}, "embedding models are not read from GGUF"),
        ({"llama__attention__value_length": 8}, "heads whose values are wider or narrower"),
    ],
)
def test_a_value_that_breaks_its_rule_is_named(
    changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    tensors = {"token_embd.weight": floats(np.zeros((8, 32)))}
    file = write_gguf(tmp_path / "m.gguf", metadata(**changes), tensors)
    with pytest.raises(ModelUnusable) as raised:
        config_of(read_model(file))
    assert str(raised.value).startswith(f"{file}: {says}")


def test_a_file_without_what_a_configuration_needs_names_the_key(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"})
    with pytest.raises(ModelUnusable, match="its metadata has no llama.embedding_length"):
        config_of(read_model(file))


def test_rows_that_no_head_has_are_a_fault_of_the_file(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": floats(np.zeros((7, 32)))}
    file = write_gguf(tmp_path / "m.gguf", metadata(), tensors)
    with pytest.raises(ModelUnusable, match="7 rows cannot be those of 2 heads"):
        Checkpoint(str(tmp_path)).read("model.layers.0.self_attn.q_proj.weight")
    assert file.exists()


def test_what_most_numbers_become_tells_how_much_memory_they_need(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": Written("Q8_0", (8, 32), bytes(8 * 34)),
        "output_norm.weight": floats(np.zeros(32)),
    }
    write_gguf(tmp_path / "m.gguf", metadata(), tensors)
    assert stored_dtype(str(tmp_path)) == np.float16
