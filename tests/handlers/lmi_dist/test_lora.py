"""What is read of an adapter's folder, and what is refused with which reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from handlers.base.adapter_names import check_names, is_end
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.linear_sites import sites_of
from handlers.lmi_dist.lora import LoraLoader
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.module_adapters import ModuleAdapters
from handlers.lmi_dist.peft import NotUsable
from handlers.lmi_dist.placement import to_tensor
from handlers.lmi_dist.step_inputs import StepInputs
from lmi.errors import BadConfiguration, SecurityRefused
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.vllm.small_adapters import HIDDEN_SIZE, OUT_FEATURES, RANK, write_adapter
from tests.tiny_models import tiny_model

MAX_RANK = 8
STEM = "base_model.model.model.layers.0.self_attn"
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.3.w1")
Tensors = dict[str, Tensor]


def sites_of_model(family: str = "llama_wide") -> Any:
    architecture = read_facts(str(tiny_model(family))).architecture
    assert architecture is not None
    return sites_of(architecture)


def loader_of(family: str, *, allow_pickle: bool = False) -> LoraLoader[Tensor]:
    # The loader makes none
    steps: list[StepInputs] = []
    facts = read_facts(str(tiny_model(family)))
    limits = LoraLimits(max_rank=MAX_RANK)
    config = EngineConfig(allow_pickle=allow_pickle)
    model = ModuleAdapters({}, lambda: steps[-1])
    return LoraLoader(facts, config, limits, sites_of_model(family), model, lambda: to_tensor)


def read(folder: Path, *, family: str = "llama_wide", allow_pickle: bool = False) -> Any:
    return loader_of(family, allow_pickle=allow_pickle).read(str(folder))


def configure(folder: Path, **settings: object) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def change(folder: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "LOHA"}, "an adapter of type LOHA, and only LORA is supported"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole modules .modules_to_save."),
        ({"use_dora": True}, "a DoRA adapter"),
        ({"bias": "lora_only"}, "changes biases .bias=lora_only."),
        ({"lora_bias": True}, "has biases"),
        ({"trainable_token_indices": [1, 2]}, "rows of the embedding"),
        ({"init_lora_weights": "pissa_niter_4"}, "weights pissa_niter_4 changed"),
        ({"target_parameters": ["experts.weight"]}, "not linears"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"alora_invocation_tokens": [3]}, "a part of the prompt"),
        ({"r": 9}, "its rank 9 is over option.max_lora_rank=8"),
        ({"r": 10**9}, "its rank 1000000000 is over"),
        ({"rank_pattern": {"v_proj": 16}}, "its rank 16 is over"),
        ({"r": 0}, "adapter_config.json: .*>= 1.*r"),
        ({"r": "four"}, "adapter_config.json: Expected `int`, got `str` - at `.*r`"),
        (
            {"rank_pattern": {"(.*)*x": 4}},
            r"rank_pattern has '\(\.\*\)\*x', which is more than a name",
        ),
        (
            {"alpha_pattern": {"(q|v)_proj": 4}},
            r"alpha_pattern has '\(q\|v\)_proj', which is more than a name: list",
        ),
        ({"alpha_pattern": {"a" * 1001: 4}}, "alpha_pattern has '?a"),
    ],
    ids=str,
)
def test_a_configuration_of_anything_but_plain_lora_is_refused(
    settings: dict[str, object], says: str, tmp_path: Path
) -> None:
    folder = configure(write_adapter(tmp_path / "adapter", seed=1), **settings)
    with pytest.raises(NotUsable, match=says):
        loader_of("llama_wide").check(str(folder))

    with pytest.raises(NotUsable, match=says):
        read(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "(.*)*x", "exclude_modules": r"(.*)*y", "layers_to_transform": [0]},
        {"target_modules": ["query"], "layers_to_transform": [7], "layers_pattern": "(.*)*x"},
    ],
)
def test_the_weights_say_which_linears_an_adapter_changes_and_no_pattern_is_followed(
    settings: dict[str, object], tmp_path: Path
) -> None:
    """`re` would hold the interpreter for ever, and with it every stream of the engine."""
    folder = write_adapter(tmp_path / "adapter", seed=1)
    before = read(folder)
    after = read(configure(folder, **settings))
    assert [read_adapter is None for read_adapter in after] == [
        read_adapter is None for read_adapter in before
    ]
    assert torch.equal(after[0].up, before[0].up)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r"self_attn\.q_proj",
        r".*\.o_proj",
        r"^model\.layers\.1\.mlp\.gate_proj",
        "lm_head$",
        "^q_proj",
    ],
)
def test_a_name_fits_the_paths_that_peft_finds(pattern: str) -> None:
    paths = [
        "lm_head",
        "q_proj",
        *(f"model.layers.{layer}.{name}" for layer in (1, 11) for name in MODULES),
    ]
    check_names(rank_pattern=[pattern])
    matches = [re.match(rf"(.*\.)?({pattern})$", path) is not None for path in paths]
    assert [is_end(pattern, path) for path in paths] == matches


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update(
        {name.replace(old, new): tensors.pop(name) for name in list(tensors)}
    )


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            renamed("q_proj", "query"),
            (
                r"self_attn.query is not among the linears of this model that adapters can change: "
                r"down_proj, g"
            ),
        ),
        (renamed("layers.1", "layers.2"), "model.layers.2.self_attn.q_proj is not among"),
        (
            lambda tensors: tensors.pop(f"{STEM}.v_proj.lora_B.weight"),
            "no lora_B of model.layers.0.self_attn.v_proj",
        ),
        (lambda tensors: tensors.clear(), "it has no weights"),
        (
            lambda tensors: tensors.update(
                {f"{STEM}.q_proj.lora_A.weight": torch.zeros(RANK, 128)}
            ),
            (
                r"lora_A of model.layers.0.self_attn.q_proj has shape \(4, 128\), this model needs "
                r"\(4, 96\)"
            ),
        ),
        (
            lambda tensors: tensors.update(
                {f"{STEM}.v_proj.lora_B.weight": torch.zeros(64, RANK + 1)}
            ),
            (
                r"lora_B of model.layers.0.self_attn.v_proj has shape \(64, 5\), this model needs "
                r"\(64, 4\)"
            ),
        ),
        (
            lambda tensors: tensors.update(
                {f"{STEM}.q_proj.lora_A.weight": torch.zeros(RANK, HIDDEN_SIZE, dtype=torch.int8)}
            ),
            "is int8, not a float",
        ),
        (
            lambda tensors: tensors.update(
                {f"{STEM}.q_proj.lora_magnitude_vector.weight": torch.zeros(1)}
            ),
            "a DoRA adapter",
        ),
        (
            lambda tensors: tensors.update(
                {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(RANK, 320)}
            ),
            "changes an embedding",
        ),
        (
            lambda tensors: tensors.update(
                {"base_model.model.model.embed_tokens.weight": torch.zeros(320, 96)}
            ),
            (
                "changes base_model.model.model.embed_tokens.weight, a weight of the base model; "
                "merge "
                "it"
            ),
        ),
        (
            lambda tensors: tensors.update(
                {"base_model.model.lm_head.base_layer.weight": torch.zeros(321, 96)}
            ),
            (
                r"resizes base_model.model.lm_head.base_layer.weight to \(321, 96\), and this model's "  # noqa: E501
                r"has \(320, 96\)"
            ),
        ),
        (
            lambda tensors: tensors.update({"base_model.model.score.weight": torch.zeros(2, 96)}),
            "no part of a plain",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    edit: Callable[[Tensors], object], says: str, tmp_path: Path
) -> None:
    folder = change(write_adapter(tmp_path / "adapter", seed=1), edit)
    with pytest.raises(NotUsable, match=says):
        read(folder)


def test_an_adapter_of_another_base_model_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", seed=1)
    with pytest.raises(
        NotUsable, match=r"lora_B of model.layers.0.self_attn.q_proj has shape \(128, 4\)"
    ):
        read(folder, family="llama")

    with pytest.raises(NotUsable, match="is not among the linears .*: c_attn, c_fc, c_proj"):
        read(folder, family="gpt2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_that_peft_saves_beside_an_adapter_of_the_head_may_be_the_models_own(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """In the dtype in which the adapter was trained."""
    name = "base_model.model.lm_head.base_layer.weight"
    # The first one's is tied
    for family in ("llama", "llama_wide"):
        folder = peft_adapters.make(
            tiny_model(family), tmp_path / family, target_modules=["lm_head"]
        )
        change(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
        *further_targets, head = read(folder, family=family)
        assert further_targets == [None] * len(further_targets) and head is not None

        change(folder, lambda tensors: tensors[name][7, 7].mul_(1.5))
        with pytest.raises(NotUsable, match=f"changes {name}"):
            read(folder, family=family)


def test_a_head_that_is_joined_with_a_projection_is_not_among_the_linears(tmp_path: Path) -> None:
    folder = change(
        write_adapter(tmp_path / "adapter", seed=1),
        renamed("model.layers.0.self_attn.q_proj", "lm_head"),
    )
    with pytest.raises(NotUsable, match="lm_head is not among the linears"):
        read(folder, family="opt_post_norm")


def test_pickled_weights_are_read_only_where_pickles_are_allowed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", seed=1)
    expected = read(folder)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(SecurityRefused, match="adapter_model.bin: pickled weights can run code"):
        read(folder)

    from_pickle = read(folder, allow_pickle=True)
    assert torch.equal(from_pickle[0].up, expected[0].up)


def test_what_a_site_joins_lies_on_a_diagonal_with_the_scale_in_it(tmp_path: Path) -> None:
    folder = configure(write_adapter(tmp_path / "adapter", seed=1), alpha_pattern={"v_proj": 2})
    tensors = load_file(folder / "adapter_model.safetensors")
    qkv, *further_targets = read(folder)[:4]

    assert further_targets == [None] * 3

    (q_down, q_up), (v_down, v_up) = (
        [tensors[f"{STEM}.{module}.lora_{part}.weight"] for part in "AB"] for module in OUT_FEATURES
    )

    assert torch.equal(qkv.down, torch.cat((q_down, v_down)))

    expected = torch.zeros(128 + 2 * 64, 2 * RANK)
    expected[:128, :RANK], expected[-64:, RANK:] = q_up * (8 / RANK), v_up * (2 / RANK)

    assert torch.equal(qkv.up, expected) and qkv.gate is None


def test_limits_are_options_with_the_names_of_vllm() -> None:
    assert LoraLimits.of({}) is LoraLimits.of({"enable_lora": "false", "max_loras": "3"}) is None
    assert LoraLimits.of({"enable_lora": "true"}) == LoraLimits(4, 16, None)
    # A default gives way to what is given.
    assert LoraLimits.of({"enable_lora": "true", "max_cpu_loras": "2"}) == LoraLimits(2, 16, 2)
    assert LoraLimits.of({"enable_lora": "true", "max_cpu_loras": "9"}) == LoraLimits(4, 16, 9)

    options = {"enable_lora": "yes", "max_loras": "2", "max_lora_rank": "64", "max_cpu_loras": "5"}
    assert LoraLimits.of(options) == LoraLimits(2, 64, 5)

    for wrong, says in (
        ({"enable_lora": "perhaps"}, "option.enable_lora=perhaps: allowed is true or false"),
        ({"max_lora_rank": "0"}, "option.max_lora_rank=0: allowed is a whole number 1..1024"),
        ({"max_cpu_loras": "1"}, "option.max_cpu_loras=1: allowed is at least option.max_loras, 2"),
    ):
        with pytest.raises(BadConfiguration, match=says):
            LoraLimits.of(options | wrong)
