"""The records of engines, which are read before the engines are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handlers.lmi_dist import about as lmi_dist
from handlers.lmi_vllm import about as lmi_vllm
from handlers.lmi_vllm.about import rank_cores
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.supervisor.kinds import environ_of_engine

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "torch",
    "vllm",
    "tensorrt_llm",
    "transformers",
    "safetensors",
    "xgrammar",
    "llguidance",
    "numpy",
}


@pytest.mark.parametrize(
    "module", sorted(path.parent.name for path in ROOT.glob("handlers/*/about.py"))
)
def test_what_an_engine_says_of_itself_can_be_imported_without_its_libraries(module: str) -> None:
    code = f"import sys, handlers.{module}.about; print({HEAVY} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_embedded_engine_runs_on_one_device_and_quantises_to_4_and_8_bits() -> None:
    for method in ("int4", "int8"):
        assert lmi_dist.check(EngineConfig(quantize=method)) == {}

    assert lmi_dist.check(EngineConfig(quantize="awq")).keys() == {"option.quantize"}

    for degree in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        assert lmi_dist.check(EngineConfig(**{degree: 2})).keys() == {f"option.{degree}"}  # type: ignore[arg-type]

    both = EngineConfig(tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert lmi_dist.check(both).keys() == {
        "option.tensor_parallel_degree",
        "option.pipeline_parallel_degree",
    }


def test_vllm_runs_pipelines_only_on_gpus() -> None:
    pipeline = EngineConfig(pipeline_parallel_degree=2)
    assert lmi_vllm.check(pipeline) == {
        "option.pipeline_parallel_degree": "1 on vllm where no GPU is used"
    }
    assert lmi_vllm.check(EngineConfig(pipeline_parallel_degree=2, device_ids=("0", "1"))) == {}


def test_an_option_of_an_engine_whose_library_is_not_installed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    reasons = {"option.device": "auto or cpu, since the library torch is not installed"}
    assert lmi_dist.check(EngineConfig(device="cuda")) == reasons

    [reasons] = lmi_vllm.check(
        EngineConfig(options={"distributed_executor_backend": "ray"})
    ).values()
    assert reasons.startswith("mp, since the library ray is not installed")


def test_vllm_refuses_the_drafts_of_the_embedded_engine_and_names_its_own() -> None:
    faults = lmi_vllm.check(EngineConfig(speculative="ngram"))
    assert (
        faults.keys() == {"option.speculative"}
        and "option.speculative_config" in faults["option.speculative"]
    )
    assert (
        lmi_dist.check(
            EngineConfig(speculative="ngram", max_step_ms=8.0, enable_prefix_caching=False)
        )
        == {}
    )


def test_vllms_arguments_are_read_from_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it were not installed
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert lmi_vllm.option_names() is None

    monkeypatch.delitem(sys.modules, "vllm")
    engine = tmp_path / "vllm" / "engine"
    engine.mkdir(parents=True)
    (engine.parent / "__init__.py").write_text("raise RuntimeError('imported by the supervisor')")
    (engine / "arg_utils.py").write_text(
        "from gpus import *\n"
        "@dataclass\nclass EngineArgs:\n"
        "    model: str = ''\n    seed: int = 0\n    enable_lora: bool = False\n    _rank: int = "
        "0\n"
        "@dataclass\nclass AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
        "class Other:\n    unrelated: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert lmi_vllm.option_names() == {
        "seed",
        "enable_lora",
        "enable_log_requests",
        *lmi_vllm.SPECULATIVE,
    }


def vllm_config(**engine: Any) -> Config:
    server = ServerConfig(log_level="WARNING")
    return Config(
        server=server,
        model=ModelConfig(path="/m", name="m"),
        engine=EngineConfig(handler="vllm", **engine),
    )


def test_vllm_sends_nothing() -> None:
    engine_environ = environ_of_engine(vllm_config(), {}, slot=0)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environ
    assert (engine_environ["VLLM_NO_USAGE_STATS"], engine_environ["DO_NOT_TRACK"]) == ("1", "1")


def test_what_vllm_compiles_is_kept_for_as_long_as_the_server_where_its_own_place_cannot_be_written(
    tmp_path: Path,
) -> None:
    def root(**environ: str) -> str | None:
        return environ_of_engine(vllm_config(), environ, slot=0, folder=str(tmp_path)).get(
            "VLLM_CACHE_ROOT"
        )

    assert (
        root(HOME=str(tmp_path)) is None
        and root(HOME="/proc/none", XDG_CACHE_HOME=str(tmp_path)) is None
    )
    assert (
        root(HOME="/proc/none")
        == root(HOME=str(tmp_path), XDG_CACHE_HOME="/proc/none")
        == f"{tmp_path}/vllm"
    )
    assert root(HOME="/proc/none", VLLM_CACHE_ROOT="/kept") is None, (
        "what the operator has set stays"
    )


def test_vllm_on_ray_joins_a_cluster_that_runs() -> None:
    on_ray = vllm_config(options={"distributed_executor_backend": "ray"})
    engine_environ = environ_of_engine(on_ray, {}, slot=0)

    assert (
        engine_environ["RAY_ADDRESS"],
        engine_environ["RAY_LOG_TO_DRIVER"],
        engine_environ["RAY_USAGE_STATS_ENABLED"],
    ) == (
        "auto",
        "0",
        "0",
    )
    assert "RAY_ADDRESS" not in environ_of_engine(on_ray, {"RAY_ADDRESS": "10.0.0.1:6379"}, slot=0)
    assert "RAY_ADDRESS" not in environ_of_engine(vllm_config(), {}, slot=0)


def test_vllm_listens_on_the_ports_of_its_slot() -> None:
    config = vllm_config(num_engines=2, ports=(9000, 9001, 9002, 9003))
    first, second = (environ_of_engine(config, {}, slot) for slot in (0, 1))

    assert (first["VLLM_PORT"], first["MASTER_PORT"]) == ("9000", "9001")
    assert (second["VLLM_PORT"], second["MASTER_PORT"]) == ("9002", "9003")
    assert "VLLM_PORT" not in environ_of_engine(config, {"VLLM_PORT": "9009"}, slot=0)
    assert {"VLLM_PORT", "MASTER_PORT"}.isdisjoint(environ_of_engine(vllm_config(), {}, slot=0))


def test_vllm_s_sockets_go_with_the_server_where_their_paths_are_short_enough() -> None:
    assert (
        environ_of_engine(vllm_config(), {}, slot=0, folder="/tmp/lmi-1")["VLLM_RPC_BASE_PATH"]
        == "/tmp/lmi-1"
    )
    for folder in ("", "/tmp/" + "a" * 80):
        assert "VLLM_RPC_BASE_PATH" not in environ_of_engine(
            vllm_config(), {}, slot=0, folder=folder
        )


def test_ranks_on_a_cpu_are_bound_to_cores_that_this_process_may_use() -> None:
    config = vllm_config(tensor_parallel_degree=2)
    cores = sorted(os.sched_getaffinity(0))
    first = cores[0]
    last = cores[-1]
    os.sched_setaffinity(0, {first, last})
    try:
        assert (
            environ_of_engine(config, {}, slot=0)["VLLM_CPU_OMP_THREADS_BIND"] == f"{first}|{last}"
        )
    finally:
        os.sched_setaffinity(0, cores)

    assert "VLLM_CPU_OMP_THREADS_BIND" not in environ_of_engine(
        config, {"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}, slot=0
    )

    on_gpus = vllm_config(tensor_parallel_degree=2, device_ids=("0", "1"))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environ_of_engine(on_gpus, {}, slot=0)


@pytest.mark.parametrize(
    ("engine", "slot", "num_cores", "groups"),
    [
        ({}, 0, 2, [(0,), (1,)]),
        ({}, 0, 5, [(0, 1), (2, 3)]),
        ({"num_engines": 2}, 1, 8, [(4, 5), (6, 7)]),
        ({"num_engines": 2}, 1, 2, [(0,), (1,)]),
        ({"num_engines": 2}, 1, 3, [(2,), (0,)]),
        ({"num_threads": 1}, 0, 4, [(0,), (2,)]),
        ({"options": {"nnodes": "2"}}, 0, 2, [(0, 1)]),
    ],
)
def test_ranks_share_the_cores_in_equal_groups(
    engine: dict[str, Any], slot: int, num_cores: int, groups: list[tuple[int, ...]]
) -> None:
    config = EngineConfig(handler="vllm", tensor_parallel_degree=2, **engine)
    assert rank_cores(config, slot, range(num_cores)) == groups
