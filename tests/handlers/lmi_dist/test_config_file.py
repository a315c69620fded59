"""config.json read by us says what it says to transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from handlers.lmi_dist import families, rotary
from handlers.lmi_dist.config_defaults import DEFAULTS
from handlers.lmi_dist.config_file import INSTALL_TORCH
from handlers.lmi_dist.config_rules import ACTIVATIONS, ROPE_TYPES
from handlers.lmi_dist.config_values import read_config
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.families import _FAMILIES, Architecture, describe
from lmi.errors import ModelUnusable
from tests.handlers.lmi_dist.published_configs import PUBLISHED
from tests.tiny_models import FAMILIES, tiny_model

ROOT = Path(__file__).resolve().parents[3]
OURS = [family for family in FAMILIES if not family.startswith("olmo2")]
ELSEWHERE = {
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "sliding_window_pattern",
    "model_type",
}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def of_transformers(folder: str) -> Architecture | None:
    return describe(AutoConfig.from_pretrained(folder))


def test_every_family_has_a_row_of_defaults() -> None:
    assert DEFAULTS.keys() == _FAMILIES.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_those_of_transformers(name: str) -> None:
    defaults = DEFAULTS[name]
    config = AutoConfig.for_model(defaults["model_type"])
    theirs = {field.name: field.default for field in fields(config)}

    assert {key: theirs[key] for key in defaults.keys() - ELSEWHERE} == {
        key: defaults[key] for key in defaults.keys() - ELSEWHERE
    }

    if "rope_theta" in defaults:
        rope = config.rope_parameters
        assert rope.get("full_attention", rope)["rope_theta"] == defaults["rope_theta"]
        assert rope.get("partial_rotary_factor", 1.0) == defaults.get("partial_rotary_factor", 1.0)

    if "rope_local_base_freq" in defaults:
        assert (
            config.rope_parameters["sliding_attention"]["rope_theta"]
            == defaults["rope_local_base_freq"]
        )

    if "sliding_window_pattern" in defaults:
        assert config.layer_types.index("full_attention") + 1 == defaults["sliding_window_pattern"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_says_the_same_to_us(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, PUBLISHED[name])
    facts = read_facts(folder)
    assert facts.architecture is not None and facts.architecture == of_transformers(folder)
    assert facts.dtype == PUBLISHED[name].get("torch_dtype")
    assert facts.is_tied == AutoConfig.from_pretrained(folder).tie_word_embeddings


def test_the_first_name_of_longrope_in_files_of_phi_3_means_it(tmp_path: Path) -> None:
    new = PUBLISHED["Phi-3 mini 128k"]
    expected = read_facts(written(tmp_path, new))
    assert (
        read_facts(written(tmp_path, new | {"rope_scaling": new["rope_scaling"] | {"type": "su"}}))
        == expected
    )


@pytest.mark.parametrize("family", OURS)
def test_a_file_says_the_same_whichever_of_its_fields_is_left_out(
    tmp_path: Path, family: str
) -> None:
    config = json.loads((tiny_model(family) / "config.json").read_text())
    used_fields = {"architectures", "model_type"}
    if family == "phi3":
        # Its default makes heads of 3 channels, which no pairs fill
        used_fields.add("num_attention_heads")

    for name in [None, *config.keys() - used_fields]:
        folder = written(tmp_path, {key: value for key, value in config.items() if key != name})
        assert architecture_or_fault(folder) == architecture_or_fault(folder, by_us=False), (
            f"without {name}"
        )


def architecture_or_fault(folder: str, *, by_us: bool = True) -> object:
    try:
        return read_facts(folder).architecture if by_us else of_transformers(folder)
    except Exception as error:
        return "a fault" if isinstance(error, ModelUnusable) or not by_us else error


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_whole_for_us(name: str) -> None:
    config = read_config(Path("config.json"), PUBLISHED[name]["architectures"][0], PUBLISHED[name])
    assert config is not None and describe(config) is not None


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "Llama 2 7B",
            {"hidden_size": "64"},
            "hidden_size must be a whole number of at least 1, given '64'",
        ),
        (
            "Llama 2 7B",
            {"num_hidden_layers": 0},
            "num_hidden_layers must be a whole number of at least 1, given 0",
        ),
        (
            "Llama 2 7B",
            {"vocab_size": True},
            "vocab_size must be a whole number of at least 1, given true",
        ),
        (
            "Llama 2 7B",
            {"vocab_size": 1.5},
            "vocab_size must be a whole number of at least 1, given 1.5",
        ),
        (
            "Llama 2 7B",
            {"vocab_size": 10**40},
            "vocab_size must be a whole number of at least 1, given 1000",
        ),
        (
            "Llama 2 7B",
            {"rms_norm_eps": float("nan")},
            "rms_norm_eps must be a number over 0, given nan",
        ),
        (
            "Llama 2 7B",
            {"tie_word_embeddings": "no"},
            "tie_word_embeddings must be true or false, given 'no'",
        ),
        ("Llama 2 7B", {"hidden_act": 3}, "hidden_act must be a text, given 3"),
        (
            "Llama 2 7B",
            {"torch_dtype": "int3"},
            "dtype must be one of float16, bfloat16, float32, float64, given 'int3'",
        ),
        (
            "Llama 2 7B",
            {"hidden_size": 4097},
            "the hidden size (4097) is not a multiple of the number of attention heads",
        ),
        (
            "Llama 2 7B",
            {"num_key_value_heads": 5},
            "num_attention_heads (32) is not a multiple of num_key_value_heads (5)",
        ),
        ("Llama 2 7B", {"head_dim": 127}, "heads of 127 channels cannot rotate 128 of them"),
        ("Llama 2 7B", {"rope_scaling": 3}, "rope_scaling must be an object, given 3"),
        ("Llama 2 7B", {"rope_theta": 0}, "rope_theta must be a number over 1, given 0"),
        (
            "Llama 2 7B",
            {"rope_scaling": {"type": "linear"}},
            "rope_parameters of type linear have no factor",
        ),
        (
            "Llama 2 7B",
            {"rope_scaling": {"type": "yarn", "factor": "4"}},
            "factor must be a number over 0, given '4'",
        ),
        (
            "Gemma 3 270M",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, num_hidden_layers is 18",
        ),
        (
            "Gemma 3 270M",
            {"layer_types": "full"},
            "layer_types must be a list of texts, given 'full'",
        ),
        (
            "Gemma 3 270M",
            {"rope_parameters": {"full_attention": 3}},
            "full_attention must be an object, given 3",
        ),
        (
            "GPT-2",
            {"n_head": 7},
            "the hidden size (768) is not a multiple of the number of attention heads (7)",
        ),
        (
            "Phi-3 mini 128k",
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "rope_parameters of type longrope have no long_factor",
        ),
        (
            "Phi-3 mini 128k",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor must have 48 entries, given 1",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_file_name_and_rule(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    folder = written(tmp_path, PUBLISHED[name] | changes)
    with pytest.raises(ModelUnusable) as caught:
        read_facts(folder)

    assert str(caught.value).startswith(f"{folder}/config.json: {said}"), str(caught.value)
    assert "\n" not in str(caught.value)


def clean_run(code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_facts_of_our_families_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folders = [str(tiny_model(family)) for family in OURS]
    for index, config in enumerate(PUBLISHED.values()):
        (tmp_path / str(index)).mkdir()
        folders.append(written(tmp_path / str(index), config))

    code = (
        "import sys; from handlers.lmi_dist.facts import read_facts\n"
        "print(all(read_facts(path).architecture for path in sys.argv[1:]))\n"
        "print({'torch', 'transformers', 'safetensors'} & sys.modules.keys())"
    )

    assert clean_run(code, *folders).splitlines() == ["True", "set()"]


def test_a_shape_that_a_file_leaves_out_comes_from_transformers(tmp_path: Path) -> None:
    folder = written(tmp_path, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    code = (
        "import sys; from handlers.lmi_dist.facts import read_facts\n"
        "print(read_facts(sys.argv[1]).num_layers, 'transformers' in sys.modules)"
    )
    assert clean_run(code, folder).split() == ["12", "True"]


def test_a_shape_left_out_is_named_where_transformers_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(
        tmp_path,
        {key: value for key, value in PUBLISHED["Qwen3 0.6B"].items() if key != "hidden_size"},
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelUnusable) as caught:
        read_facts(folder)

    reason = (
        "the default of hidden_size is known to transformers, which is not installed: pip "
        "install transformers"
    )

    assert str(caught.value) == f"{folder}/config.json: {reason}"


@pytest.mark.parametrize("has_torch", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "rope_type 'foo' is not known, only "),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope' is not known, only "),
        ({"hidden_act": "foo"}, "hidden_act 'foo' is not known, only "),
        (
            {"layer_types": ["chunked_attention"]},
            "LlamaForCausalLM has layers of another kind, chunked_attention; ",
        ),
    ],
)
def test_a_part_that_nobody_knows_names_itself_and_not_what_is_not_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    said: str,
    has_torch: bool,
) -> None:
    folder = written(tmp_path, PUBLISHED["Llama 2 7B"] | change)
    if not has_torch:
        monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ModelUnusable) as caught:
        read_facts(folder)

    message = str(caught.value)
    assert message.startswith(f"{folder}/config.json: {said}")
    assert "torch is not installed" not in message

    if "rope_scaling" in change:
        assert message.endswith("default, dynamic, linear, llama3, longrope, proportional, yarn")


def test_the_parts_that_need_no_transformers_are_those_of_our_tables() -> None:
    assert rotary.RULES.keys() == ROPE_TYPES
    assert families._ACTIVATIONS.keys() == ACTIVATIONS


@pytest.mark.parametrize(
    "config",
    [
        PUBLISHED["Phi-2"] | {"qk_layernorm": True},
        PUBLISHED["Llama 2 7B"] | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    ],
)
def test_what_needs_torch_says_so_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    folder = written(tmp_path, config)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelUnusable) as caught:
        read_facts(folder)

    [name] = config["architectures"]
    reason = (
        f"{name} runs through the modules of transformers, and torch is not installed: "
        f"{INSTALL_TORCH}"
    )

    assert str(caught.value) == f"{folder}/config.json: {reason}"
