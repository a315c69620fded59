"""The settings of one of several models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable, SecurityRefused
from lmi.settings.config import ServerConfig
from lmi.settings.model_settings import resolve_model
from lmi.settings.report import Resolved
from lmi.settings.resolve import resolve_folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "h" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    return tmp_path / "models"


def settle(
    store: Path, text: str = "", environ: Mapping[str, str] | None = None, flags: dict[str, str] | None = None
) -> Resolved:
    model = store / "h" / "model"
    (model / "serving.properties").write_text("option.rolling_batch=echo\n" + text)
    server = ServerConfig(model_store=str(store), frontend_workers=7, log_level="DEBUG", model_flags=flags or {})
    return resolve_model("chat", str(model), server, environ or {})


def test_the_model_has_the_name_that_it_was_loaded_under_and_the_server_its_own_settings(store: Path) -> None:
    text = "option.model_name=other\noption.model_alias=more\nport=9\nlog_level=ERROR\nfrontend_workers=2"
    resolved = settle(store, text)
    assert (resolved.config.model.name, resolved.config.model.aliases) == ("chat", ())
    assert (resolved.config.server.frontend_workers, resolved.config.server.log_level) == (7, "DEBUG")
    [note] = [note for note in resolved.notes if "one of several models" in note]
    assert "option.model_name, option.model_alias, port, log_level, frontend_workers: no effect" in note


def test_its_file_counts_and_the_environment_and_the_command_line_too(store: Path) -> None:
    environ = {"OPTION_MAX_MODEL_LEN": "512", "OPTION_DTYPE": "bf16", "RETRY_WINDOW": "1"}
    engine = settle(store, "option.dtype=fp32\nrequired_memory_mb=77", environ, {"retry_threshold": "5"}).config.engine
    assert (engine.dtype, engine.max_sequence_length, engine.retry_threshold) == ("fp32", 512, 5)
    assert engine.required_memory_mb == 77


@pytest.mark.parametrize("name", ["HF_MODEL_ID", "OPTION_MODEL_ID", "SERVING_LOAD_MODELS", "OPTION_SERVED_MODEL_NAME"])
def test_a_model_that_the_environment_names_is_not_meant(store: Path, name: str) -> None:
    config = settle(store, "", {name: "/etc", "SAGEMAKER_BIND_TO_PORT": "1", "SAGEMAKER_MULTI_MODEL": "true"}).config
    assert (config.model.path, config.model.name) == (str(store / "h" / "model"), "chat")


@pytest.mark.parametrize("url", ["relative", "", "/etc", "/", "{store}", "{store}/h/../..", "{store}/link", "\0"])
def test_a_folder_outside_of_the_store_is_refused(store: Path, url: str) -> None:
    (store / "link").symlink_to("/etc")
    with pytest.raises(ModelUnusable, match="model_store"):
        resolve_model("chat", url.format(store=store), ServerConfig(model_store=str(store)), {})


def test_its_file_leads_nowhere_else(store: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnusable, match="model_store"):
        settle(store, f"option.model_id={tmp_path}")


def test_secure_mode_holds_for_each_model(store: Path) -> None:
    secure = ServerConfig(
        model_store=str(store), secure_mode=True, security_controls=("DISALLOW_PICKLE_FILES",), download_dir="/cache"
    )
    model = store / "h" / "model"
    (model / "serving.properties").write_text("option.rolling_batch=echo\nsecure_mode=false\n")
    resolve_model("chat", str(model), secure, {})
    (model / "model.bin").write_text("")
    with pytest.raises(SecurityRefused, match=r"model\.bin"):
        resolve_model("chat", str(model), secure, {})


def test_nothing_is_downloaded_or_installed_for_it(store: Path) -> None:
    with pytest.raises(ModelUnusable, match="nothing is downloaded"):
        settle(store, "option.model_id=s3://bucket/model")
    (store / "h" / "model" / "model.py").write_text("def handle(inputs): ...")
    (store / "h" / "model" / "requirements.txt").write_text("tomli")
    with pytest.raises(ModelUnusable, match=r"requirements\.txt: nothing is installed"):
        settle(store)


def test_a_bad_option_is_named_with_its_place(store: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"option.dtype='nonsense' \(.*/serving.properties:2\)"):
        settle(store, "option.dtype=nonsense")


def test_a_server_with_several_models_needs_none(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=fp32\nmax_models=3\n")
    flags = {"option.max_model_len": "64", "port": "0"}
    resolved = resolve_folder(str(tmp_path), {"SAGEMAKER_MULTI_MODEL": "True"}, flags)
    server = resolved.config.server
    assert (server.multi_model, server.max_models) == (True, 3)
    assert server.model_flags == {"option.max_model_len": "64"}
    assert [note for note in resolved.notes if note.startswith("option.dtype") and "its own file" in note]
