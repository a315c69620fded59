"""None"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import ModelUnusable, SecurityRefused
from lmi.sources.fetches import WantedSource
from lmi.sources.listing import taken
from lmi.sources.source import check, chosen, descended, fault, refuse_pickles

SMALL = [
    "config.json",
    "tokenizer.model",
    "merges.txt",
    "spiece.spm",
    "chat.jinja",
    "qwen.tiktoken",
]


def test_configuration_tokenizer_and_safetensors_are_taken() -> None:
    further_files = [
        "README.md",
        "a.gguf",
        "a.onnx",
        "tf_model.h5",
        "flax_model.msgpack",
        "a.png",
        ".gitattributes",
    ]

    assert chosen([*SMALL, "model.safetensors", *further_files]) == sorted(
        [*SMALL, "model.safetensors"]
    )


def test_pickles_are_taken_only_where_they_are_allowed_and_nothing_else_is_there() -> None:
    pickles = ["pytorch_model.bin", "a.pt", "b.pth"]
    assert chosen(pickles) == []
    assert chosen(pickles, allow_pickle=True) == sorted(pickles)
    assert chosen([*pickles, "model.safetensors"], allow_pickle=True) == ["model.safetensors"]


def test_each_folder_is_judged_separately() -> None:
    paths = [
        "model.safetensors",
        "adapters/a/adapter_model.bin",
        "adapters/b/adapter_model.safetensors",
    ]
    assert chosen(paths) == ["adapters/b/adapter_model.safetensors", "model.safetensors"]
    assert "adapters/a/adapter_model.bin" in chosen(paths, allow_pickle=True)


def test_code_is_taken_only_if_it_is_trusted() -> None:
    assert chosen(["modeling.py"]) == []
    assert chosen(["modeling.py"], trust_remote_code=True) == ["modeling.py"]


def test_weights_in_the_authors_form_are_not_taken_beside_the_usual_ones() -> None:
    consolidated = ["consolidated.safetensors", "consolidated.safetensors.index.json"]
    assert chosen([*consolidated, "model-00001-of-00002.safetensors"]) == [
        "model-00001-of-00002.safetensors"
    ]
    assert chosen(consolidated) == sorted(consolidated)
    assert chosen(["original/params.json", "original/tokenizer.model"]) == []


def test_only_pickles_are_refused_and_the_first_is_named() -> None:
    with pytest.raises(SecurityRefused, match=r"fox: a\.bin is pickled"):
        refuse_pickles("fox", ["config.json", "b.bin", "a.bin"], allow_pickle=False)

    refuse_pickles("fox", ["a.bin"], allow_pickle=True)
    refuse_pickles("fox", ["a.bin", "model.safetensors"], allow_pickle=False)
    refuse_pickles("fox", ["config.json"], allow_pickle=False)


INDEX = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
WHOLE = {"config.json": "{}", "model.safetensors": "x"}
SHARDED = {"config.json": "{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": "x"}


def folder_with(path: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)

    return path


@pytest.mark.parametrize(
    "files",
    [
        WHOLE,
        SHARDED | {"model-2.safetensors": "x"},
        {"config.json": "{}", "pytorch_model.bin": "x"},
        WHOLE | {"pytorch_model.bin.index.json": INDEX},
        SHARDED
        | {
            "model-2.safetensors": "x",
            "consolidated.safetensors.index.json": '{"weight_map": {"a": "c.1"}}',
        },
    ],
    ids=[
        "one-file",
        "shards",
        "pickle",
        "index-of-pickles-not-fetched",
        "index-of-the-authors-not-fetched",
    ],
)
def test_a_folder_is_whole(tmp_path: Path, files: dict[str, str]) -> None:
    assert fault(folder_with(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is empty; a model has config.json"),
        (
            {"model.safetensors": "x", "a.txt": ""},
            "holds a.txt, model.safetensors; a model has config.json",
        ),
        ({"a.gguf": ""}, "holds a.gguf; a model has config.json"),
        ({"config.json": "{}"}, r"holds config.json; no weights are there"),
        (
            {"config.json": "{}", "model.py": ""},
            "holds config.json, model.py; no weights are there",
        ),
        (SHARDED, "has no model-2.safetensors, which model.safetensors.index.json names"),
        (
            {**SHARDED, "model.safetensors.index.json": "{"},
            "model.safetensors.index.json is not an index of weights",
        ),
    ],
)
def test_a_folder_that_is_not_whole_says_what_is_missing(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    folder_with(tmp_path, files)
    with pytest.raises(ModelUnusable) as raised:
        check(tmp_path)

    assert str(raised.value).startswith(f"{tmp_path}: ") and said in str(raised.value)


def test_a_folder_that_is_not_there_or_is_a_file_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert fault(tmp_path / "none") == "does not exist"
    assert fault(tmp_path / "file") == "is not a folder"


def test_only_pickled_weights_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    folder_with(tmp_path, {"config.json": "{}", "pytorch_model.bin": "x"})
    with pytest.raises(SecurityRefused, match=r"a/b: pytorch_model.bin .*option.allow_pickle=true"):
        check(tmp_path, name="a/b")

    check(tmp_path, allow_pickle=True)


def test_an_adapter_has_files_of_its_own(tmp_path: Path) -> None:
    folder_with(tmp_path, {"adapter_config.json": "{}"})
    with pytest.raises(ModelUnusable, match="no weights are there"):
        check(tmp_path, is_adapter=True)

    folder_with(tmp_path, {"adapter_model.safetensors": "x"})
    check(tmp_path, is_adapter=True)


def test_a_listing_is_judged_by_its_first_level() -> None:
    source = WantedSource(source="s3://b/p", download_dir="/d")
    with pytest.raises(ModelUnusable, match="holds fox; a model has config.json"):
        taken("s3://b/p", ["fox/config.json", "fox/model.safetensors"], source)

    files_listed = ["config.json", "model.safetensors", "sub/a.bin"]
    assert taken("s3://b/p", files_listed, source) == files_listed[:2]


def test_the_only_folder_is_descended(tmp_path: Path) -> None:
    folder_with(tmp_path / "packed", {"fox/config.json": "{}", "._fox": ""})
    assert descended(tmp_path / "packed").name == "fox"
    folder_with(tmp_path / "two", {"fox/config.json": "{}", "hare/config.json": "{}"})
    assert descended(tmp_path / "two").name == "two"
    folder_with(tmp_path / "plain", WHOLE)
    assert descended(tmp_path / "plain").name == "plain"
