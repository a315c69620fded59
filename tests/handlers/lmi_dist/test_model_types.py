"""What config.json alone says about a model, before any library is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handlers.lmi_dist.config_file import RUN_HERE, check
from handlers.lmi_dist.families import _FAMILIES
from lmi.errors import ModelUnusable
from lmi.settings.resolve import resolve_folder

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "transformers", "safetensors", "numpy"}
REFUSED = {
    "bert": ("BertForMaskedLM", "bert", "BertForMaskedLM is not a decoder of text"),
    "a classifier": (
        "Qwen3ForSequenceClassification",
        "qwen3",
        "ForSequenceClassification is not a decoder of text",
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "t5",
        "T5ForConditionalGeneration is an encoder and a decoder",
    ),
    "mamba": ("MambaForCausalLM", "mamba", "MambaForCausalLM does not run on attention alone"),
    "gpt-j": (
        "GPTJForCausalLM",
        "gptj",
        "GPTJForCausalLM has an attention of its own, which does not let lmi-dist keep",
    ),
    "no such type": (
        "PerceptronForCausalLM",
        "perceptron",
        "knows no model_type 'perceptron', a newer one may",
    ),
}


def model(folder: Path, architecture: object, model_type: object, **more: object) -> Path:
    config = {"architectures": [architecture], "model_type": model_type, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_is_refused_by_the_settings_with_what_can(
    tmp_path: Path, name: str
) -> None:
    architecture, model_type, reason = REFUSED[name]
    model(tmp_path, architecture, model_type, is_encoder_decoder=model_type == "t5")
    with pytest.raises(ModelUnusable) as refusal:
        resolve_folder(str(tmp_path), {}, {"option.rolling_batch": "lmi-dist"})

    assert str(refusal.value).startswith(f"{tmp_path}/config.json: ") and reason in str(
        refusal.value
    )
    assert str(refusal.value).endswith(RUN_HERE)


def test_a_checkpoint_that_is_quantised_in_another_way_is_refused_with_its_method(
    tmp_path: Path,
) -> None:
    model(
        tmp_path,
        "LlamaForCausalLM",
        "llama",
        quantization_config={"quant_method": "fp8"},
    )
    with pytest.raises(ModelUnusable) as refusal:
        resolve_folder(str(tmp_path), {}, {"option.rolling_batch": "lmi-dist"})

    assert str(refusal.value) == (
        f"{tmp_path}/config.json: its weights are quantised already (quantization_config: 'fp8'), "
        f"which lmi-dist does "
        "not read; option.rolling_batch=vllm does"
    )


def test_a_model_that_cannot_run_here_is_told_what_to_do_before_what_does_run(
    tmp_path: Path,
) -> None:
    model(tmp_path, "BertForMaskedLM", "bert")
    with pytest.raises(ModelUnusable) as refusal:
        resolve_folder(str(tmp_path), {}, {"option.rolling_batch": "lmi-dist"})

    assert (
        "is not a decoder of text; option.rolling_batch=vllm runs more; lmi-dist runs Llama"
        in str(refusal.value)
    )


def test_it_is_refused_before_a_library_is_imported(tmp_path: Path) -> None:
    model(tmp_path, "PerceptronForCausalLM", "perceptron")
    code = (
        "import sys; from pathlib import Path; from lmi.settings.resolve import resolve_folder\n"
        f"try: resolve_folder({str(tmp_path)!r}, {{}}, {{'option.rolling_batch': 'lmi-dist'}})\n"
        f"except Exception as error: print(type(error).__name__, {HEAVY} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "ModelUnusable set()"


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        *((name, "llama") for name in _FAMILIES),
        ("BloomForCausalLM", "bloom"),
        ("GPTNeoXForCausalLM", "gpt_neox"),
        ("GPT2LMHeadModel", "gpt-sw3"),
        ("FoxForCausalLM", None),
        (None, "llama"),
        ({"a": 1}, ["llama"]),
    ],
)
def test_what_is_not_known_may_run(tmp_path: Path, architecture: Any, model_type: Any) -> None:
    check(model(tmp_path, architecture, model_type))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"architectures": []}', '{"architectures": {}}', "\udc80"]
)
def test_a_file_that_cannot_be_read_is_left_to_the_engine(tmp_path: Path, text: str) -> None:
    check(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    check(tmp_path)


def test_the_families_of_our_decoder_are_named() -> None:
    names = {
        name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").rstrip("0123456789")
        for name in _FAMILIES
    }
    assert {
        name for name in names if name.lower() not in RUN_HERE.replace("-", "").lower()
    } == set()
