"""A configuration on its way from the supervisor to its children."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.json import decode, encode

from lmi.settings.config import (
    Config,
    EngineConfig,
    LogConfig,
    ModelConfig,
    RequestsConfig,
    ServerConfig,
)
from tests.settings.settling import FOUR_GPUS, settle

words = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.builds(ServerConfig), st.builds(ModelConfig, path=words), st.builds(EngineConfig))
def test_a_configuration_survives_the_way_to_a_child(
    server: ServerConfig, model: ModelConfig, engine: EngineConfig
) -> None:
    config = Config(server=server, model=model, engine=engine)
    assert decode(encode(config), type=Config) == config


def test_a_resolved_configuration_survives_the_way_to_a_child(folder: Path) -> None:
    text = "option.x=ü\nload_on_devices=1;2\npredict_timeout=1.5\noption.quantize=int8\n"
    config = settle(folder, text, machine=FOUR_GPUS).config
    assert decode(encode(config), type=Config) == config
    assert config.engine.device_ids == ("1", "2")


def test_a_model_is_meant_by_its_name_its_aliases_and_the_word_model() -> None:
    assert ModelConfig(path="", name="a", aliases=("b", "model")).names == ("a", "model", "b")
    assert ModelConfig(path="", name="model").names == ("model",)


def test_settings_are_frozen_and_take_only_what_they_declare() -> None:
    log = LogConfig(log_level="DEBUG")
    with pytest.raises(FrozenInstanceError, match="log_level"):
        log.log_level = "INFO"  # type: ignore[misc]

    with pytest.raises(FrozenInstanceError, match="log_level"):
        del log.log_level

    with pytest.raises(TypeError, match="LogConfig has no field log_levle"):
        LogConfig(log_levle="DEBUG")  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="ModelConfig needs a value of path"):
        ModelConfig()  # type: ignore[call-arg]

    assert replace(log, log_format="json") == LogConfig(log_level="DEBUG", log_format="json")


def test_settings_are_equal_by_the_fields_that_count() -> None:
    assert ServerConfig() == ServerConfig(keeps_queue_short=False)
    assert ServerConfig() != ServerConfig(port=8081)
    assert LogConfig() != RequestsConfig()
    assert repr(LogConfig()).startswith("LogConfig(log_level='INFO', log_format='auto', ")
