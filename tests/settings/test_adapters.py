"""The adapters beside the model, and what is said of those that are not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable, SecurityRefused
from tests.settings.settling import settle

ENABLED = "option.rolling_batch=echo\noption.enable_lora=true"


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text("")
    return folder


def test_the_adapters_beside_the_model_and_beside_serving_properties_are_found(
    folder: Path,
) -> None:
    inner = folder / "weights"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    folders = {
        name: write_adapter(place / "adapters" / name)
        for place, name in ((folder, "b"), (inner, "a"))
    }
    (inner / "adapters" / ".git").mkdir()
    (inner / "adapters" / "README.md").write_text("")
    resolved = settle(folder, f"{ENABLED}\noption.model_id=weights")

    assert resolved.config.model.adapters == {
        name: str(path.resolve()) for name, path in folders.items()
    }
    assert not [line for line in resolved.warnings if "adapters in" in line]


@pytest.mark.parametrize(
    "text", ["option.rolling_batch=echo", "option.rolling_batch=echo\noption.enable_lora=no"]
)
def test_adapters_that_are_not_loaded_are_one_warning_and_may_be_broken(
    folder: Path, text: str
) -> None:
    (folder / "adapters" / "a b").mkdir(parents=True)
    (folder / "adapters" / "c").mkdir()
    resolved = settle(folder, text)
    [warning] = [line for line in resolved.warnings if "adapters in" in line]
    assert warning == (
        f"the adapters in {folder / 'adapters'} are not loaded: "
        "option.enable_lora=true loads them, on an engine that has adapters"
    )
    assert resolved.config.model.adapters == {}


def test_one_name_is_one_adapter_s(folder: Path) -> None:
    inner = folder / "weights"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    for place in (folder, inner):
        write_adapter(place / "adapters" / "a")

    with pytest.raises(
        ModelUnusable,
        match="weights/adapters/a: an adapter has a name of its own, and .*/adapters/a has",
    ):
        settle(folder, f"{ENABLED}\noption.model_id=weights")


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 255 + "%", "a#b"])
def test_the_name_of_a_folder_is_the_name_of_an_adapter(folder: Path, name: str) -> None:
    write_adapter(folder / "adapters" / name[-200:])
    with pytest.raises(ModelUnusable, match="the folder's name must be 1 to 256 letters, digits"):
        settle(folder, ENABLED)


def test_an_adapter_beside_the_model_has_its_files_and_a_name_that_the_model_has_not(
    folder: Path,
) -> None:
    files = write_adapter(folder / "adapters" / "a")
    with pytest.raises(
        ModelUnusable, match="an adapter has a name of its own, and the model has this one"
    ):
        settle(folder, f"{ENABLED}\noption.model_name=a")

    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (files / name).unlink()
        with pytest.raises(ModelUnusable, match=f"adapters/a: an adapter's folder has an {name}"):
            settle(folder, ENABLED)


def test_pickled_weights_need_leave(folder: Path) -> None:
    weights = write_adapter(folder / "adapters" / "a") / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(
        SecurityRefused, match=r"adapter_model.bin is a pickle, .* or set option.allow_pickle=true"
    ):
        settle(folder, ENABLED)

    assert settle(folder, f"{ENABLED}\noption.allow_pickle=true").config.model.adapters


@pytest.mark.parametrize("text", ["relative", "/a;", "/a,b"])
def test_adapter_roots_are_absolute(folder: Path, text: str) -> None:
    with pytest.raises(BadConfiguration, match="allowed is absolute paths with ; between"):
        settle(folder, f"adapter_roots={text}")


def test_sagemaker_s_variable_bounds_the_adapters(folder: Path) -> None:
    environ = {"SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY": "4"}
    assert settle(folder, "max_adapters=9", environ).config.server.max_adapters == 4
    assert settle(folder, "").config.server.max_adapters == 128
