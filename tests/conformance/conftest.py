"""The table of executors that must keep the contract. Every test here runs on each of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmi.executor import Executor
from lmi.settings.config import EngineConfig
from tests.handlers.vllm.small_adapters import write_adapter as write_vllm_adapter
from tests.system.engines.foreign_engine import MAX_ADAPTERS
from tests.system.engines.foreign_engine import Executor as ForeignExecutor
from tests.system.engines.foreign_engine import write_adapter as write_foreign_adapter
from tests.tiny_models import tiny_model

MAX_NUM_SEQUENCES = 4


def echo() -> Executor:
    from handlers.echo import EchoExecutor

    options = {"echo_step_ms": "2", "echo_max_num_sequences": str(MAX_NUM_SEQUENCES)}
    return EchoExecutor(EngineConfig(handler="echo", max_sequence_length=512, options=options))


def foreign() -> Executor:
    return ForeignExecutor(EngineConfig(handler="foreign"))


def foreign_with_adapters(model: Path) -> Executor:
    executor = ForeignExecutor(EngineConfig(handler="foreign", options={"enable_lora": "true"}))
    executor.load_adapter("formal", str(write_foreign_adapter(model / "formal", shift=1)))
    return executor


def lmi_dist() -> Executor:
    from handlers.lmi_dist import Executor

    return Executor(tiny_model("llama"), EngineConfig(max_num_sequences=MAX_NUM_SEQUENCES, max_sequence_length=512))


def vllm() -> Executor:
    from handlers.lmi_vllm import Executor

    return Executor(tiny_model("llama_wide"), vllm_config())


def vllm_multi_process() -> Executor:
    from handlers.lmi_vllm import Executor

    return Executor(tiny_model("llama_wide"), vllm_config(), is_multi_process=True)


def vllm_with_adapters(model: Path, *, is_multi_process: bool = False) -> Executor:
    from handlers.lmi_vllm import Executor

    config = vllm_config(enable_lora="true", max_loras=str(MAX_ADAPTERS), max_lora_rank="8")
    executor = Executor(tiny_model("llama_wide"), config, is_multi_process=is_multi_process)
    executor.load_adapter("formal", str(write_vllm_adapter(model / "formal", seed=1)))
    return executor


def vllm_config(**options: str) -> EngineConfig:
    return EngineConfig(
        handler="vllm",
        options=options,
        dtype="fp32",
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=512,
        max_kv_cache_tokens=8192,
    )


@dataclass(frozen=True)
class Adaptable:
    """An engine with the adapter `formal`; `write` makes another one in a new folder."""

    executor: Executor
    write: Callable[[Path], Path]


EXECUTORS: dict[str, Callable[[], Executor]] = {"echo": echo, "lmi-dist": lmi_dist, "foreign": foreign}
ADAPTABLE: dict[str, tuple[Callable[[Path], Executor], Callable[[Path], Path]]] = {
    "foreign": (foreign_with_adapters, lambda folder: write_foreign_adapter(folder, shift=2)),
}
if importlib.util.find_spec("vllm") is not None:
    ADAPTABLE |= {
        "vllm": (vllm_with_adapters, lambda folder: write_vllm_adapter(folder, seed=2)),
        "vllm-multi-process": (
            lambda model: vllm_with_adapters(model, is_multi_process=True),
            lambda folder: write_vllm_adapter(folder, seed=2),
        ),
    }
    EXECUTORS |= {"vllm": vllm, "vllm-multi-process": vllm_multi_process}


@pytest.fixture(params=EXECUTORS, scope="session")
def shared(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """One executor for all tests of an engine, since loading is slow. Only tests that end it ask for `fresh`."""
    with EXECUTORS[request.param]() as executor:
        yield executor


@pytest.fixture
def executor(shared: Executor) -> Executor:
    shared.await_responses(timeout_s=0)
    shared.get_latest_iteration_stats()
    return shared


@pytest.fixture(params=EXECUTORS)
def fresh(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with EXECUTORS[request.param]() as executor:
        yield executor


@pytest.fixture(params=ADAPTABLE, scope="session")
def adaptable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adaptable]:
    load, write = ADAPTABLE[request.param]
    with load(tmp_path_factory.mktemp("adaptable")) as executor:
        yield Adaptable(executor, write)
