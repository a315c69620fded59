"""The folder of an adapter that a client names, under secure mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.adapters.source import find_local
from lmi.errors import InvalidRequest
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig


def config(model: Path, *controls: str, adapter_roots: tuple[str, ...] = ()) -> Config:
    server = ServerConfig(
        secure_mode=bool(controls),
        security_controls=controls,
        adapter_roots=adapter_roots,
        download_dir=str(model.parent / "cache"),
    )
    return Config(
        server=server, model=ModelConfig(path=str(model), name="m"), engine=EngineConfig()
    )


def write_adapter(folder: Path, *more: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", *more):
        (folder / name).write_text("{}")

    return folder


def refusal(src: Path, of: Config) -> str:
    with pytest.raises(InvalidRequest) as caught:
        find_local(str(src), of)

    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("model.py", "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"),
        ("requirements.txt", "DISALLOW_REQUIREMENTS_TXT"),
        ("optimizer.pt", "DISALLOW_PICKLE_FILES"),
        ("chat_template.jinja", "DISALLOW_CHAT_TEMPLATE"),
    ],
)
def test_what_a_control_refuses_is_refused_in_an_adapter_too(
    tmp_path: Path, name: str, control: str
) -> None:
    adapter = write_adapter(tmp_path / "model" / "one", name)
    assert f"{adapter / name}: refused by {control}" in refusal(
        adapter, config(tmp_path / "model", control)
    )
    assert find_local(str(adapter), config(tmp_path / "model")) == adapter


def test_in_secure_mode_further_roots_count_for_nothing(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "elsewhere" / "one")
    roots = (str(tmp_path / "elsewhere"),)
    secured = config(tmp_path / "model", "DISALLOW_PICKLE_FILES", adapter_roots=roots)
    assert "is outside of the model's folder" in refusal(adapter, secured)
    assert find_local(str(adapter), config(tmp_path / "model", adapter_roots=roots)) == adapter


def test_download_dir_is_a_place_for_adapters(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "cache" / "one")
    for of in (config(tmp_path / "model"), config(tmp_path / "model", "DISALLOW_PICKLE_FILES")):
        assert find_local(str(adapter), of) == adapter
