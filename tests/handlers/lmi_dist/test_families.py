"""Every family against transformers: the same greedy tokens, with requests that come and go in the
batch.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PhiConfig

from handlers.lmi_dist import Executor
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.families import describe
from handlers.lmi_dist.rotary import RULES
from handlers.lmi_dist.runner import Runner
from lmi.errors import ModelUnusable
from tests.handlers.lmi_dist.play import (
    Player,
    load_native,
    load_runner,
    play_together,
    random_players,
)
from tests.handlers.lmi_dist.whole_sequence import read_program
from tests.tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, tiny_model

ROOT = Path(__file__).resolve().parents[3]
# The families that the generic decoder knows
OURS = [family for family in FAMILIES if family not in ("olmo2", "olmo2_tied", "llama_deep")]
LENGTHS = [1, 3, 40, 127, 128, 129, 200, 300]
NUM_ANSWERS = 12
# When the two best logits of the reference are this close, either is right
TIE = 1e-4


def generate(path: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The reference: greedy tokens of transformers, and the distance of the best logit to the
    second for each.
    """
    model = reference(path)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_ANSWERS,
            min_new_tokens=NUM_ANSWERS,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )

    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


_references: dict[Path, torch.nn.Module] = {}


def reference(path: Path) -> torch.nn.Module:
    if path not in _references:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        _references[path] = model.eval()

    return _references[path]


def agree(player: Player, expected: list[int], gaps: list[float]) -> bool:
    """They are equal up to a tie of the reference; after it they may differ."""
    for answer, token, gap in zip(player.answers, expected, gaps, strict=True):
        if answer != token:
            if gap < TIE:
                warnings.warn(
                    f"a tie of the reference: its best logits differ by {gap:.1e}", stacklevel=2
                )

            return gap < TIE

    return True


@pytest.mark.filterwarnings("default:a tie of the reference")
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_gives_the_greedy_tokens_of_transformers_while_requests_join_and_leave(
    family: str,
) -> None:
    path = tiny_model(family)
    check_greedy_tokens(path, load_runner(path, num_slots=5, max_length=400))


@pytest.mark.filterwarnings("default:a tie of the reference")
@pytest.mark.parametrize("family", OURS)
def test_native_kernels_give_the_greedy_tokens_of_transformers_while_requests_join_and_leave(
    family: str,
) -> None:
    path = tiny_model(family)
    check_greedy_tokens(path, load_native(path, max_length=400))


def check_greedy_tokens(path: Path, runner: Runner) -> None:
    players = random_players(VOCAB_SIZE, LENGTHS, NUM_ANSWERS, seed=5)
    assert play_together(runner, players, num_slots=5, seed=3) >= 2
    for player in players:
        assert agree(player, *generate(path, player.prompt))


@pytest.mark.filterwarnings("default:a tie of the reference")
@pytest.mark.parametrize(
    "loader", [load_native, partial(load_runner, num_slots=5)], ids=["native", "torch"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_head_that_is_not_the_embedding_is_used_though_the_config_says_tied(
    family: str, loader: Callable[..., Runner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = torch.randn(VOCAB_SIZE, 96, generator=torch.Generator().manual_seed(7)) * 0.25
    folder = with_tensors(tmp_path / "model", family, {"lm_head.weight": head})
    runner = loader(folder, max_length=400)
    [warning] = [
        record.getMessage()
        for record in caplog.records
        if record.name == "handlers.lmi_dist.operation_reader"
    ]

    assert warning.startswith(
        f"{folder}/model.safetensors: lm_head.weight is used although config.json says tie_word_"
    )

    assert generate(folder, [5, 6, 7])[0] != generate(tiny_model(family), [5, 6, 7])[0], (
        "else nothing is compared"
    )

    check_greedy_tokens(folder, runner)


def test_a_head_that_is_the_embedding_stays_tied_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = load_file(tiny_model("llama") / "model.safetensors")["model.embed_tokens.weight"]
    folder = with_tensors(tmp_path / "model", "llama", {"lm_head.weight": embedding.clone()})
    expected, actual = (
        load_native(path, max_length=64).program for path in (tiny_model("llama"), folder)
    )

    assert not caplog.records
    assert len(actual.operations) == len(expected.operations)

    [*_, last] = read_program(str(folder), 64).operations
    [first, *_] = read_program(str(folder), 64).operations

    assert torch.equal(last.weight, first.table)


def with_tensors(folder: Path, family: str, tensors: dict[str, torch.Tensor]) -> Path:
    """The tiny model of a family with further tensors in its file."""
    shutil.copytree(tiny_model(family), folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    return folder


def test_the_generic_decoder_knows_all_families_but_the_one_that_tests_the_fallback() -> None:
    architectures = {
        family: read_facts(str(tiny_model(family))).architecture for family in FAMILIES
    }
    assert [family for family, architecture in architectures.items() if architecture is None] == [
        "olmo2",
        "olmo2_tied",
    ]


def test_facts_are_known_without_weights(tmp_path: Path) -> None:
    folder = tiny_model("gemma")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    facts = read_facts(str(tmp_path))
    assert (facts.vocab_size, facts.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    # k and v, layers, heads, channels, bytes
    assert facts.kv_bytes_per_token(2) == 2 * 2 * 1 * 16 * 2


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(architectures=["GPT2LMHeadModel"], scale_attn_by_inverse_layer_idx=True),
        PhiConfig(architectures=["PhiForCausalLM"], qk_layernorm=True),
        PhiConfig(architectures=["PhiForCausalLM"], hidden_act="quick_gelu"),
    ],
)
def test_a_switch_that_no_table_has_goes_to_the_fallback(config: object) -> None:
    assert describe(config) is None


def test_the_context_ends_where_rope_would_change_with_the_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = AutoConfig.from_pretrained(tiny_model("llama"), rope_parameters=parameters)
    with caplog.at_level(logging.WARNING):
        architecture = describe(config)

    assert architecture is not None and architecture.context_length == 256
    assert (
        "256 tokens: beyond it dynamic scaling would change the keys of earlier tokens"
        in caplog.text
    )


def test_the_page_of_what_works_says_which_rope_scalings_end_the_context_early_and_why() -> None:
    text = (ROOT / "handlers" / "README.md").read_text()
    [whole, early] = next(
        part for part in text.split("\n\n") if part.startswith("**Context.**")
    ).split("With ", 1)
    ends_early = {"dynamic", "longrope"}
    assert all(f"`{kind}`" in whole for kind in RULES.keys() - ends_early)
    assert (
        all(f"`{kind}`" in early for kind in ends_early) and "cached keys would be wrong" in early
    )


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_cut_context_is_reported_once_at_load(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_model(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {
        "rope_type": "dynamic",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING), Executor(folder) as executor:
        assert executor.info.max_sequence_length == 256

    assert caplog.text.count("the context ends at 256 tokens") == 1


def test_a_model_whose_past_is_not_keys_and_values_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnusable) as caught:
        load_runner(tmp_path, num_slots=2, max_length=64)

    assert "Mamba" in str(caught.value) and "\n" not in str(caught.value)
