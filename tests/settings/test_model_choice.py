"""The model, its names, and the messages about models that are not served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.json import decode, encode

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.config import Config
from lmi.settings.resolve import resolve_folder
from tests.settings.settling import faults, settle, source_of


def test_a_model_beside_the_file_or_named_by_it_is_found(folder: Path) -> None:
    outer = folder.parent
    assert settle(outer, "option.model_id=tiny").config.model.path == str(folder)
    for text in (str(folder), f"file:{folder}", f"file://{folder}"):
        model = settle(outer, f"option.model_id={text}").config.model
        assert (model.path, model.name) == (str(folder), "tiny")

    model_config = settle(folder, "option.model_name=My-Model").config.model
    assert (model_config.path, model_config.name) == (str(folder), "My-Model")


def test_a_model_may_have_further_names(folder: Path) -> None:
    assert settle(folder).config.model.aliases == ()
    for text in ("ensemble; vllm_model", "ensemble,vllm_model"):
        resolved = settle(folder, f"option.model_alias={text}")
        assert resolved.config.model.aliases == ("ensemble", "vllm_model")
        assert decode(encode(resolved.config), type=Config) == resolved.config
        assert (
            next(row.value for row in resolved.settings if row.option == "option.model_alias")
            == "ensemble;vllm_model"
        )


@pytest.mark.parametrize(
    "text", ["org/chat-7b, chat", "org/chat-7b chat", '["org/chat-7b", "chat"]']
)
def test_the_first_served_name_is_the_models_and_the_others_answer_too(
    folder: Path, text: str
) -> None:
    model = settle(
        folder, f"option.rolling_batch=lmi-dist\noption.served_model_name={text}"
    ).config.model
    assert (model.name, model.aliases) == ("org/chat-7b", ("chat",))

    resolved = settle(
        folder, f"option.model_name=ours\noption.model_alias=more\noption.served_model_name={text}"
    )

    assert (resolved.config.model.name, resolved.config.model.aliases) == (
        "ours",
        ("more", "org/chat-7b", "chat"),
    )
    assert resolved.warnings == ()
    assert source_of(resolved, "option.model_name") == "serving.properties:1"


@pytest.mark.parametrize("url", ["{folder}", "file:{folder}", "file://{folder}"])
def test_load_models_gives_the_folder_and_the_name(folder: Path, url: str) -> None:
    text = f"test::MPI={url.format(folder=folder)}"
    for environ, flags in (({"SERVING_LOAD_MODELS": text}, {}), ({}, {"load_models": text})):
        resolved = resolve_folder(None, environ, flags, folder.parent.parent)
        assert (resolved.config.model.path, resolved.config.model.name) == (str(folder), "test")
        assert resolved.warnings == ()

    resolved = resolve_folder(str(folder), {"SERVING_LOAD_MODELS": text}, {}, folder.parent)
    assert (resolved.config.model.name, resolved.warnings) == ("test", ())


def test_the_name_of_load_models_stays_where_another_option_names_the_model(folder: Path) -> None:
    environ = {
        "SERVING_LOAD_MODELS": f"test::MPI={folder.parent}/nowhere",
        "HF_MODEL_ID": str(folder),
    }
    resolved = resolve_folder(None, environ, {}, folder.parent)
    assert (resolved.config.model.path, resolved.config.model.name) == (str(folder), "test")
    del environ["HF_MODEL_ID"]
    with pytest.raises(ModelUnusable, match="nowhere: does not exist"):
        resolve_folder(None, environ, {}, folder.parent)


def test_the_names_of_both_ways_answer(folder: Path) -> None:
    environ = {"SERVING_LOAD_MODELS": f"test={folder}", "OPTION_SERVED_MODEL_NAME": "llama"}
    model = resolve_folder(None, environ, {}, folder.parent).config.model
    assert (model.name, model.aliases) == ("llama", ("test",))


def test_models_of_load_models_that_are_not_served_are_told(folder: Path, tmp_path: Path) -> None:
    second_folder = tmp_path / "other"
    shutil.copytree(folder, second_folder)
    both = {"SERVING_LOAD_MODELS": f"a={folder},b={second_folder}"}
    resolved = resolve_folder(None, both, {}, tmp_path)

    assert (resolved.config.model.name, resolved.config.model.path) == ("a", str(folder))
    assert resolved.warnings == (
        f"load_models (SERVING_LOAD_MODELS): one model is served, so 'b::={second_folder}' is not",
    )

    elsewhere = resolve_folder(
        str(second_folder), {"SERVING_LOAD_MODELS": f"a={folder}"}, {}, tmp_path
    )
    assert elsewhere.config.model.name == "other"

    (warning,) = elsewhere.warnings
    place = "load_models (SERVING_LOAD_MODELS)"
    assert warning == f"{place}: the model in {second_folder} is served and this is not"


@pytest.mark.parametrize("text", ["ALL", "NONE"])
def test_all_models_of_the_store_are_the_folder_that_is_served(folder: Path, text: str) -> None:
    assert settle(folder, "", {"SERVING_LOAD_MODELS": text}).config == settle(folder).config


def test_the_engine_of_load_models_is_held_to_the_same_rule(folder: Path) -> None:
    (fault,) = faults(folder, environ={"SERVING_LOAD_MODELS": "test::DeepSpeed=/opt/ml/model"})
    assert fault.startswith("load_models='DeepSpeed' (SERVING_LOAD_MODELS): allowed is ")


@pytest.mark.parametrize("text", ["test=", "a b=", "[a=/m", "-=/m"])
def test_a_malformed_load_models_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(BadConfiguration, match="allowed is NAME=PATH"):
        resolve_folder(str(folder), {"SERVING_LOAD_MODELS": text}, {}, folder.parent)


@pytest.mark.parametrize("model_id", ["/some/folder", "./missing", "gs://bucket/m"])
def test_a_model_that_is_neither_a_folder_nor_a_remote_source_is_refused_by_name(
    folder: Path, model_id: str
) -> None:
    for text, environ in ((f"option.model_id={model_id}", {}), ("", {"HF_MODEL_ID": model_id})):
        with pytest.raises(ModelUnusable, match=model_id) as caught:
            settle(folder, text, environ)

        assert caught.value.exit_code == 4
