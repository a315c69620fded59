"""A model whose weights stay in the blocks of its GGUF file answers as its float32 does."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.memory import need_of
from handlers.lmi_dist.native.library import load
from handlers.lmi_dist.native_runner import NativeRunner, bytes_of_file, weight_bytes
from handlers.lmi_dist.plan import Chunk, Plan
from lmi.settings.config import EngineConfig
from lmi.shared.gguf_file import read_model
from lmi.sources.gguf.config import config_of
from tests.gguf_files import smollm2_file
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.lmi_dist.play import forward, load_native, table_of
from tests.tiny_gguf import ARCHITECTURES, write_tiny_gguf
from tests.tiny_models import VOCAB_SIZE, tiny_model

NUM_TOKENS = 200
MAX_LENGTH = 256
# Of a log-prob, over the whole vocabulary.
MAX_DIFFERENCE = 0.01
# Of the best tokens of random prompts.
MIN_AGREEMENT = 0.99
MB = 1 << 20
IN_FLOAT32 = EngineConfig(dtype="fp32")
TINY_IDS = np.random.default_rng(2).integers(3, VOCAB_SIZE, 100).tolist()
# What adapters change in families that name or join their linears otherwise.
ADAPTED = {
    "llama_bias": ("q_proj", "o_proj", "up_proj"),
    "gemma3": ("k_proj", "gate_proj", "down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "gpt2": ("c_attn", "c_fc"),
}


def folder_of(file: Path, folder: Path) -> Path:
    (folder / "model.gguf").symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config_of(read_model(file))))
    return folder


def log_probs(runner: NativeRunner, ids: list[int], cuts: list[int], adapter: int = 0) -> Tensor:
    """Of every token, in chunks that end at `cuts`."""
    table = table_of(0, MAX_LENGTH)
    rows: list[Tensor] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        chunk = Chunk(0, start, ids[start:end], end - start, table, adapter=adapter)
        rows.append(forward(runner, Plan([], [chunk])))

    return torch.cat(rows).log_softmax(-1)


def test_a_real_file_answers_as_in_float32_and_no_cut_changes_a_bit(tmp_path: Path) -> None:
    folder = folder_of(smollm2_file(), tmp_path)
    facts = read_facts(str(folder))
    ids = np.random.default_rng(1).integers(0, facts.vocab_size, NUM_TOKENS).tolist()

    exact_runner = load_native(folder, EngineConfig(dtype="fp32"), max_length=MAX_LENGTH)
    assert exact_runner.dtype == "float32"
    exact = log_probs(exact_runner, ids, [])
    del exact_runner

    runner = load_native(folder, max_length=MAX_LENGTH)
    assert runner.dtype.endswith("blocks")
    whole = log_probs(runner, ids, [])
    assert torch.equal(whole, log_probs(runner, ids, [1, 64, 67, 150]))

    difference = float((whole - exact).abs().max())
    agreement = float((whole.argmax(-1) == exact.argmax(-1)).float().mean())
    print(f"{facts.name}: log-probs differ by {difference:.4f}, {agreement:.1%} of the best agree")
    assert difference < MAX_DIFFERENCE
    assert agreement >= MIN_AGREEMENT


def tiny_folder(family: str, folder: Path) -> Path:
    file = write_tiny_gguf(family, folder / "written.gguf", in_blocks=True)
    return folder_of(file, folder)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_answers_in_blocks_as_in_float32(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(family, tmp_path)
    exact = log_probs(load_native(folder, IN_FLOAT32, max_length=MAX_LENGTH), TINY_IDS, [])

    runner = load_native(folder, max_length=MAX_LENGTH)
    assert runner.dtype.endswith("blocks")
    whole = log_probs(runner, TINY_IDS, [])
    assert torch.equal(whole, log_probs(runner, TINY_IDS, [1, 33, 70]))

    difference = float((whole - exact).abs().max())
    print(f"{family}: log-probs differ by {difference:.4f}")
    assert 0 < difference < MAX_DIFFERENCE


@pytest.mark.parametrize("family", ["llama_bias", "gemma3", "phi3", "gpt2"])
def test_an_adapter_adds_to_blocks_what_it_adds_to_float32(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(family, tmp_path)
    modules = ADAPTED[family]
    adapter = peft_adapters.make(
        tiny_model(family), tmp_path / "adapter", target_modules=list(modules)
    )

    def with_adapter(dtype: str) -> tuple[Tensor, Tensor]:
        config = EngineConfig(dtype=dtype, options={"enable_lora": "true"})
        runner = load_native(folder, config, max_length=MAX_LENGTH)
        assert runner.adapters is not None
        runner.adapters.model.put_adapter(1, runner.adapters.read(str(adapter)))
        without = log_probs(runner, TINY_IDS, [])
        return without, log_probs(runner, TINY_IDS, [40], adapter=1)

    without, exact = with_adapter("fp32")
    assert not torch.allclose(exact, without, atol=0.1)

    _, kept = with_adapter("auto")
    difference = float((kept - exact).abs().max())
    print(f"{family}: with an adapter log-probs differ by {difference:.4f}")
    assert 0 < difference < MAX_DIFFERENCE


def test_the_memory_of_kept_blocks_is_known_before_they_are_read(tmp_path: Path) -> None:
    file = smollm2_file()
    facts = read_facts(str(folder_of(file, tmp_path)))
    config = EngineConfig()
    kept = bytes_of_file(load(), config, facts.path)
    assert kept is not None

    size = file.stat().st_size
    assert 0.95 * size < kept < 1.1 * size
    need = need_of(facts, config, partial(weight_bytes, facts, config), kept)
    assert kept <= need.weights < kept + 8 * MB


@pytest.mark.parametrize(
    "config",
    [EngineConfig(dtype="fp32"), EngineConfig(dtype="bf16"), EngineConfig(quantize="int8")],
)
def test_an_option_for_the_weights_takes_them_out_of_their_blocks(
    config: EngineConfig, tmp_path: Path
) -> None:
    facts = read_facts(str(folder_of(smollm2_file(), tmp_path)))
    assert bytes_of_file(load(), config, facts.path) is None
