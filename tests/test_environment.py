"""What children find in their environment: no secrets for who meets strangers, the right number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.environment import num_engine_threads, of_child, of_threads, without_secrets


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"]
    + ["DB_PASSWORD", "OPENAI_API_KEY", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "aws_secret_access_key"],
)
def test_a_secret_is_kept_from_front_ends(name: str) -> None:
    assert without_secrets({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "LMI_RUNTIME_DIR", "AWS_REGION", "KEYMAP"])
def test_what_is_no_secret_stays(name: str) -> None:
    assert without_secrets({name: "x"}) == {name: "x"}


def test_a_small_model_leaves_a_core_to_the_front_end_and_a_big_one_takes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmi.processes.num_usable_cores", lambda: 8)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"small")
    assert num_engine_threads(EngineConfig(), str(tmp_path)) == 7
    with open(weights, "ab") as file:
        file.truncate(65 << 20)
    assert num_engine_threads(EngineConfig(), str(tmp_path)) == 8
    assert num_engine_threads(EngineConfig(num_engines=3), str(tmp_path)) == 2
    assert num_engine_threads(EngineConfig(num_threads=5), str(tmp_path)) == 5
    monkeypatch.setattr("lmi.processes.num_usable_cores", lambda: 1)
    assert num_engine_threads(EngineConfig(num_engines=3), str(tmp_path)) == 1


def test_threads_of_kernels_spin_shortly_and_an_operator_may_set_their_number(tmp_path: Path) -> None:
    def config(num_threads: int | None) -> Config:
        model = ModelConfig(path=str(tmp_path), name="m")
        return Config(server=ServerConfig(), model=model, engine=EngineConfig(num_threads=num_threads))

    assert of_threads(config(3), {"OMP_NUM_THREADS": "5"}) == {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "3"}
    assert of_threads(config(None), {"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "7"}) == {"GOMP_SPINCOUNT": "7"}
    assert int(of_threads(config(None), {})["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize("name", ["GUNICORN_CMD_ARGS", "GUNICORN_FD", "LISTEN_FDS", "WEB_CONCURRENCY"])
def test_what_would_change_how_gunicorn_starts_is_left_out(name: str) -> None:
    assert of_child({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}
