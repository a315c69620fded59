"""The table of executors that must keep the contract; every test here runs on each of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from lmi.executor import Executor
from lmi.settings.config import EngineConfig
from tests.tiny_models import tiny_model

MAX_NUM_SEQUENCES = 4


def echo() -> Executor:
    from handlers.echo import EchoExecutor

    options = {"echo_step_ms": "2", "echo_max_num_sequences": str(MAX_NUM_SEQUENCES)}
    return EchoExecutor(EngineConfig(handler="echo", max_sequence_length=512, options=options))


def lmi_dist() -> Executor:
    from handlers.lmi_dist import Executor

    return Executor(tiny_model("llama"), EngineConfig(max_num_sequences=MAX_NUM_SEQUENCES, max_sequence_length=512))


def vllm() -> Executor:
    from handlers.lmi_vllm import Executor

    return Executor(tiny_model("llama_wide"), vllm_config())


def vllm_apart() -> Executor:
    from handlers.lmi_vllm import Executor

    return Executor(tiny_model("llama_wide"), vllm_config(), is_apart=True)


def vllm_config() -> EngineConfig:
    return EngineConfig(
        handler="vllm",
        dtype="fp32",
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=512,
        max_kv_cache_tokens=8192,
    )


EXECUTORS: dict[str, Callable[[], Executor]] = {"echo": echo, "lmi-dist": lmi_dist}
if importlib.util.find_spec("vllm") is not None:
    EXECUTORS |= {"vllm": vllm, "vllm-apart": vllm_apart}


@pytest.fixture(params=EXECUTORS, scope="session")
def shared(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """One for all tests of an engine: loading is the slow part. Only tests that end it ask for `fresh`."""
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
