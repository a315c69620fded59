"""LoRA adapters for TensorRT-LLM: what it would leave out is refused before it reads an adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from handlers.base.adapters import LoadedAdapter
from lmi.errors import Unsupported
from tests.handlers.trtllm.double import loaded

CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "bias": "none",
}
STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(params=["main-2025-10", "main-2026-08"])
def adapters(request: pytest.FixtureRequest) -> Iterator[Any]:
    with loaded(request.param):
        from handlers.lmi_trtllm import adapters

        yield adapters


def write(folder: Path, stem: str = STEM, rank: int = 4, **changes: object) -> LoadedAdapter:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    tensors = {
        f"{stem}.lora_A.weight": torch.zeros(rank, 8),
        f"{stem}.lora_B.weight": torch.zeros(16, rank),
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return LoadedAdapter("poems", 3, str(folder))


def limits(max_rank: int, **fields: Any) -> Any:
    """The engine's own class, of the double that is importable now, wherever its module is."""
    from tensorrt_llm.llmapi.llm_args import LoraConfig

    return LoraConfig(max_lora_rank=max_rank, **fields)


def test_adapters_are_asked_for_with_a_configuration_that_says_how_many_stay(adapters: Any) -> None:
    assert adapters.arguments({"enable_lora": False, "lora_config": None}) == {}
    assert adapters.arguments({"enable_lora": True})["lora_config"].max_loras == 4
    lora_config = adapters.arguments({"enable_lora": True, "lora_config": limits(8, max_loras=2)})[
        "lora_config"
    ]
    assert (lora_config.max_loras, lora_config.max_lora_rank) == (2, 8)


def test_an_adapter_goes_by_name_number_and_path(adapters: Any, tmp_path: Path) -> None:
    lora_request = adapters.lora_request(LoadedAdapter("poems", 3, str(tmp_path)))
    assert (lora_request.lora_name, lora_request.lora_int_id, lora_request.lora_path) == (
        "poems",
        3,
        str(tmp_path),
    )
    with pytest.raises(ValueError, match="gone"):
        adapters.lora_request(LoadedAdapter("poems", 3, str(tmp_path / "gone")))


def test_an_adapter_that_the_engine_follows_wholly_passes(adapters: Any, tmp_path: Path) -> None:
    adapters.check_adapter(
        write(tmp_path, use_rslora=True, modules_to_save=None, rank_pattern={"q_proj": 4}),
        limits(4),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', given 'IA3'"),
        ({"r": 9}, r"r must be from 1 to 8 \(option.max_lora_rank\), given 9"),
        ({"r": "4"}, "r must be from 1 to 8"),
        ({"use_dora": True}, "use_dora must be false or absent, given true: it would be left out"),
        ({"bias": "all"}, "bias must be 'none' or absent, given 'all'"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern must be an object of 0 or absent"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be a list of 0 or absent"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_configuration_of_which_a_part_would_be_left_out_is_refused(
    adapters: Any, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {said}"):
        adapters.check_adapter(write(tmp_path, **changes), limits(8))


@pytest.mark.parametrize(
    ("stem", "rank", "said"),
    [
        ("base_model.model.lm_head", 4, "base_model.model.lm_head.lora_A.weight would be left out"),
        (STEM.replace("q_proj", "other"), 4, "other.lora_A.weight would be left out"),
        (STEM, 9, "lora_A.weight has the rank 9, and option.max_lora_rank is 8"),
    ],
)
def test_weights_that_would_be_left_out_are_refused_by_name(
    adapters: Any, tmp_path: Path, stem: str, rank: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        adapters.check_adapter(write(tmp_path, stem, rank), limits(8))


@pytest.mark.parametrize("shape", [(), (4,), (4, 8, 1)])
@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_a_weight_that_is_no_matrix_is_refused_by_name_and_shape(
    adapters: Any, tmp_path: Path, side: str, shape: tuple[int, ...]
) -> None:
    adapter = write(tmp_path)
    weight = f"{STEM}.{side}.weight"
    save_file({weight: torch.zeros(shape)}, tmp_path / "adapter_model.safetensors")
    words = f"{weight} must have two dimensions, given the shape {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(words)):
        adapters.check_adapter(adapter, limits(8))


def test_only_linears_that_the_engines_configuration_names_pass(
    adapters: Any, tmp_path: Path
) -> None:
    adapter = write(tmp_path)
    adapters.check_adapter(adapter, limits(8, lora_target_modules=["attn_q"]))
    renames = {"attn_dense": "q_proj"}
    adapters.check_adapter(
        adapter, limits(8, lora_target_modules=["attn_dense"], trtllm_modules_to_hf_modules=renames)
    )
    with pytest.raises(ValueError, match="q_proj.lora_A.weight would be left out"):
        adapters.check_adapter(adapter, limits(8, lora_target_modules=["attn_k", "attn_v"]))


def test_the_engine_itself_says_which_linears_it_follows(adapters: Any, tmp_path: Path) -> None:
    """Main of August 2026 follows adapters of Mamba and of shared experts too."""
    adapter = write(tmp_path, STEM.replace("self_attn.q_proj", "mixer.in_proj"))
    if adapters.LoraConfig.__module__ == "tensorrt_llm.lora_helper":
        with pytest.raises(ValueError, match="in_proj.lora_A.weight would be left out"):
            adapters.check_adapter(adapter, limits(8))
    else:
        adapters.check_adapter(adapter, limits(8))


def test_a_configuration_that_cannot_be_read_is_named_and_weights_are_left_to_the_engine(
    adapters: Any, tmp_path: Path
) -> None:
    adapter = write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0nonsense!")
    adapters.check_adapter(adapter, limits(8))
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config\.json: "):
        adapters.check_adapter(adapter, limits(8))


def test_a_pin_is_refused_because_nothing_would_keep_it(adapters: Any, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(
        Unsupported, match="^pin is not supported here: TensorRT-LLM pins no adapter"
    ):
        adapters.check_adapter(LoadedAdapter("poems", 3, str(tmp_path), is_pinned=True), limits(8))
