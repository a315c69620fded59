"""Any wrong folder gives one line that names the file and the cause."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from handlers.lmi_dist.loading import refused_if_broken
from handlers.lmi_dist.plan import Chunk, Plan
from lmi.errors import ModelUnusable, SecurityRefused
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import forward, load_native, load_runner
from tests.tiny_models import embedding_model, tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "model"))


def run(folder: Path, **settings: bool) -> torch.Tensor:
    runner = load_runner(folder, EngineConfig(**settings), num_slots=2, max_length=64)
    return forward(runner, Plan([], [Chunk(0, 0, [5, 6, 7])]))


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def scribble(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 1000)


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def drop_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def drop_bias(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.bias"))


def shorten_tensor(folder: Path) -> None:
    change(
        folder,
        lambda tensors: tensors.update(
            {"model.norm.weight": tensors["model.norm.weight"][:-1].clone()}
        ),
    )


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def strip_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


def rename_model_type(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}'
    )


def take_a_classifier(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertForSequenceClassification"]}'
    )


def remove_all(folder: Path) -> None:
    shutil.rmtree(folder)


def clear(folder: Path) -> None:
    remove_all(folder)
    folder.mkdir()


def lose_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()


def narrow_tensor(folder: Path) -> None:
    name = "model.norm.weight"
    dtype = torch.float8_e4m3fn
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def quantise_tensor(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)

    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("harm", "file", "cause"),
    [
        (truncate, WEIGHTS, "not a whole safetensors file"),
        (scribble, WEIGHTS, "not a whole safetensors file"),
        (empty, WEIGHTS, "not a whole safetensors file"),
        (drop_tensor, "model", "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (drop_bias, "model", "tensor model.layers.0.self_attn.q_proj.bias is missing"),
        (
            shorten_tensor,
            WEIGHTS,
            "tensor model.norm.weight has shape (95,), config.json needs (96,)",
        ),
        (remove_weights, "model", "no model.safetensors"),
        (remove_config, "config.json", "missing"),
        (break_config, "config.json", "not JSON"),
        (strip_config, "config.json", "no architectures"),
        (rename_model_type, "config.json", "nonesuch"),
        (take_a_classifier, "config.json", "BertForSequenceClassification is not a decoder"),
        (remove_all, "model", "does not exist"),
        (clear, "model", "is empty"),
        (lose_shard, "b.safetensors", "missing"),
        (
            narrow_tensor,
            WEIGHTS,
            "tensor model.norm.weight cannot be read: its dtype F8_E4M3 is not read here",
        ),
        (
            quantise_tensor,
            WEIGHTS,
            (
                "tensor model.layers.0.mlp.up_proj.weight is int8, weights must be float32, bfloat16, "  # noqa: E501
                "float16 or float64"
            ),
        ),
        (empty_index, "model.safetensors.index.json", "no weight_map"),
    ],
)
def test_a_broken_folder_is_one_line_that_names_file_and_cause(
    folder: Path, harm: Callable[[Path], None], file: str, cause: str
) -> None:
    harm(folder)
    with pytest.raises(ModelUnusable) as caught:
        run(folder)

    message = str(caught.value)
    assert file in message and cause in message
    assert "\n" not in message


def test_the_cause_in_a_fault_of_transformers_is_told_though_it_stands_on_the_second_line(
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(tiny_model("olmo2"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "65"}))
    with pytest.raises(ModelUnusable, match=r"config\.json: .*expected int, got str"):
        run(folder)


def test_shards_give_what_one_file_gives(folder: Path) -> None:
    expected = run(folder)
    shard(folder)
    assert torch.equal(run(folder), expected)


def test_a_checkpoint_without_the_first_word_of_its_names_is_read(folder: Path) -> None:
    """`save_pretrained` of the model without its head writes such names, and the first GPT-2 files
    have them.
    """
    expected = run(folder)
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS)
    assert torch.equal(run(folder), expected)


def test_pickled_weights_are_refused_unless_allowed(folder: Path) -> None:
    expected = run(folder)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    remove_weights(folder)
    with pytest.raises(SecurityRefused, match=r"pytorch_model\.bin.*allow_pickle"):
        run(folder)

    assert torch.equal(run(folder, allow_pickle=True), expected)


def test_pickled_weights_of_a_model_that_transformers_runs_are_refused_too(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("olmo2"), tmp_path / "model"))
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    remove_weights(folder)
    with pytest.raises(SecurityRefused, match=r"pytorch_model\.bin.*allow_pickle"):
        run(folder)


def test_a_pickle_that_would_run_code_is_refused_even_when_allowed(
    folder: Path, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)

    remove_weights(folder)
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelUnusable, match=r"pytorch_model\.bin"):
        run(folder, allow_pickle=True)

    assert not (tmp_path / "ran").exists()


def test_safetensors_beside_a_pickle_are_used(folder: Path) -> None:
    expected = run(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert torch.equal(run(folder), expected)


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_weights_in_float64_are_rounded_to_float32(
    folder: Path, dtype: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(folder)
    change(
        folder,
        lambda tensors: tensors.update({name: tensor.double() for name, tensor in tensors.items()}),
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    with caplog.at_level(logging.INFO):
        assert torch.equal(run(folder), expected)

    assert caplog.messages.count(f"{folder}: weights in float64 are rounded to float32") == 1

    runner = load_native(folder, max_length=64)
    assert runner.dtype == "float32"


UNUSED = {
    "a bias that config.json does not have": {"model.layers.0.self_attn.o_proj.bias": 96},
    "a layer": {
        "model.layers.2.mlp.up_proj.weight": 112,
        "model.layers.2.mlp.down_proj.weight": 96,
    },
    "heads of a trainer": {
        "score.weight": 2,
        "v_head.summary.bias": 1,
        "v_head.summary.weight": 1,
        "x.y": 1,
    },
}


@pytest.mark.parametrize("names", UNUSED.values(), ids=UNUSED)
def test_tensors_that_the_model_does_not_use_are_told_in_one_line(
    folder: Path, names: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    change(
        folder,
        lambda tensors: tensors.update({name: torch.zeros(size) for name, size in names.items()}),
    )
    load_native(folder, max_length=64)
    [warning] = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    count = (
        "1 tensor of its weight files is"
        if len(names) == 1
        else f"{len(names)} tensors of its weight files are"
    )
    assert warning.startswith(f"{folder}: {count} not used, config.json has no place for ")

    for name in sorted(names)[:3]:
        assert name in warning

    assert warning.endswith(", …") is (len(names) > 3)


def test_leftovers_of_older_libraries_and_trainers_are_not_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.cos_cached",
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.masked_bias",
        "h.1.attn.bias",
        "optimizer.state.0.exp_avg",
    ]
    change(folder, lambda tensors: tensors.update({name: torch.zeros(1) for name in names}))
    load_native(folder, max_length=64)

    assert not caplog.records


def test_the_head_of_a_model_that_gives_embeddings_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_native(embedding_model(tmp_path / "model", "qwen3"), max_length=64)
    assert not caplog.records


def test_transformers_modules_tell_what_they_do_not_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_model("olmo2"), tmp_path / "model"))
    change(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2)}))
    run(folder)
    assert (
        f"{folder}: 1 tensor of its weight files is not used, config.json has no place for it: "
        f"score.weight" in (caplog.messages)
    )


@pytest.mark.parametrize(
    "error", [ValueError("odd"), KeyError("odd"), ZeroDivisionError("odd"), TypeError("odd")]
)
def test_a_fault_of_the_files_that_no_rule_has_found_is_one_line_too(error: Exception) -> None:
    """So the engine ends with the exit code of a model that cannot be used, and is not started
    again.
    """
    with pytest.raises(
        ModelUnusable, match=rf"^folder: the model cannot be loaded: {type(error).__name__}: .*odd"
    ):
        with refused_if_broken("folder"):
            raise error

    with pytest.raises(MemoryError), refused_if_broken("folder"):
        raise MemoryError
