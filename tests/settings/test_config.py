"""A configuration on its way from the supervisor to its children."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, strategies as st
from msgspec.json import decode, encode

from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
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
