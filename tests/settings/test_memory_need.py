"""What a model needs of the host's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from handlers.lmi_dist.native_variants import ROUNDING_VARIANTS, built_variants, variant_here
from lmi.models.settings import MB, PROCESS_BYTES, need_bytes
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig

WEIGHTS = 10 * MB
FACTS = {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
DTYPES = ("auto", "bf16", "fp16", "fp32")
# Numbers: keys and values, layers, heads, channels
TOKEN = 2 * 2 * 4 * 8


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(FACTS))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(WEIGHTS)

    return Config(
        server=ServerConfig(),
        model=ModelConfig(path=str(tmp_path), name="m"),
        engine=EngineConfig(),
    )


def need(config: Config, **engine: object) -> int:
    return need_bytes(replace(config, engine=replace(config.engine, **engine)))  # type: ignore[arg-type]


def test_it_is_what_the_option_says(config: Config) -> None:
    for need_mb in (77, 0):
        with_need = replace(config, model=replace(config.model, required_memory_mb=need_mb))
        assert need(with_need, num_engines=3) == need_mb * MB


def test_it_is_the_widened_weights_the_cache_and_the_process_for_each_replica(
    config: Config,
) -> None:
    in_float32 = int(1.2 * WEIGHTS * 2) + 100 * TOKEN * 4 + PROCESS_BYTES
    assert need(config, max_kv_cache_tokens=100) == in_float32
    assert need(config, max_kv_cache_tokens=100, num_engines=2) == 2 * in_float32

    as_stored = int(1.2 * WEIGHTS) + 100 * TOKEN * 2 + PROCESS_BYTES
    assert need(config, max_kv_cache_tokens=100, dtype="bf16") == as_stored


def test_the_embedded_engine_keeps_bfloat16_and_has_such_a_cache_where_the_cpu_multiplies_it(
    config: Config,
) -> None:
    if variant_here() not in built_variants():
        pytest.skip("the native kernels are not built for this CPU")

    number_bytes = 2 if variant_here() in ROUNDING_VARIANTS else 4
    weights = int(1.2 * WEIGHTS)
    sizes = {
        dtype: need(config, handler="lmi-dist", max_kv_cache_tokens=100, dtype=dtype)
        for dtype in DTYPES
    }
    narrow = weights + 100 * TOKEN * number_bytes + PROCESS_BYTES
    wide = 2 * weights + 100 * TOKEN * 4 + PROCESS_BYTES

    assert sizes == {"auto": narrow, "bf16": narrow, "fp16": wide, "fp32": wide}
    assert need(config, handler="lmi-dist", max_kv_cache_tokens=100, quantize="int8") == narrow


def test_the_cache_has_room_for_the_usual_requests(config: Config) -> None:
    without = need(config, max_kv_cache_tokens=0)
    assert need(config) - without == 64 * 512 * TOKEN * 4
    assert need(config, max_num_sequences=2, max_sequence_length=100) - without == 200 * TOKEN * 4


def test_on_gpus_only_the_processes_count(config: Config) -> None:
    assert need(config, device_ids=("0", "1"), num_engines=2) == 2 * PROCESS_BYTES


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"num_hidden_layers": "many"}'])
def test_a_config_that_says_nothing_is_no_fault(config: Config, text: str) -> None:
    (Path(config.model.path) / "config.json").write_text(text)
    assert need(config) == int(1.2 * WEIGHTS) + PROCESS_BYTES
