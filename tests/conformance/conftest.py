"""The table of executors that must keep the contract. Every test here runs on each of them that
can.

A test that an engine cannot is skipped with the name of the capability that it lacks, and with no
other reason.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmi.executor import Capabilities, Executor
from lmi.settings.config import EngineConfig
from tests.conformance.table import has, named
from tests.handlers.trtllm.double import double
from tests.handlers.trtllm.facts import PROFILES
from tests.handlers.vllm.small_adapters import write_adapter as write_small_adapter
from tests.system.engines.foreign_engine import (
    MAX_ADAPTERS,
    Executor as ForeignExecutor,
    write_adapter as write_foreign_adapter,
)
from tests.tiny_models import tiny_model

MAX_NUM_SEQUENCES = 4
ASKED: dict[str, Any] = {
    "max_beam_width": 4,
    "request_stats_max_iterations": 10_000,
}  # of every engine
PROCESSORS = """
import time
from lmi.executor import LogitsPostProcessorConfig

def slow(request_id, logits, tokens, stream, client_id):
    time.sleep(0.02)

def only_seven(request_id, logits, tokens, stream, client_id):
    kept = logits[..., 7].clone()
    logits.fill_(float("-inf"))
    logits[..., 7] = kept

def broken(request_id, logits, tokens, stream, client_id):
    raise RuntimeError("the processor's own fault")

def batched(request_ids, logits, tokens, stream, client_ids):
    for request_id, rows in zip(request_ids, logits):
        only_seven(request_id, rows, [], stream, None)

logits_post_processors = LogitsPostProcessorConfig(
    processor_map={"only_seven": only_seven, "broken": broken, "slow": slow}, processor_batched=batched
)
"""  # noqa: E501


def echo() -> Executor:
    from handlers.echo import EchoExecutor

    options = {"echo_step_ms": "5", "echo_max_num_sequences": str(MAX_NUM_SEQUENCES)}
    return EchoExecutor(
        EngineConfig(handler="echo", max_sequence_length=512, options=options, **ASKED)
    )


def foreign() -> Executor:
    return ForeignExecutor(EngineConfig(handler="foreign", **ASKED))


def foreign_with_adapters(model: Path) -> Executor:
    executor = ForeignExecutor(EngineConfig(handler="foreign", options={"enable_lora": "true"}))
    executor.load_adapter("formal", str(write_foreign_adapter(model / "formal", shift=1)))
    return executor


def lmi_dist() -> Executor:
    from handlers.lmi_dist import Executor

    config = EngineConfig(
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=512,
        additional_outputs=("logits:context", "hidden_states"),
        logits_post_processors="processors.py",
        **ASKED,
    )
    return Executor(with_processors(tiny_model("llama")), config)


def with_processors(model: Path) -> str:
    """A folder beside the model's with its files and a file of logits post-processors."""
    folder = shutil.copytree(
        model, model.with_name(f"{model.name}_with_processors"), dirs_exist_ok=True
    )
    (folder / "processors.py").write_text(PROCESSORS)
    return str(folder)


def lmi_dist_with_adapters(model: Path) -> Executor:
    from handlers.lmi_dist import Executor

    options = {"enable_lora": "true", "max_loras": str(MAX_ADAPTERS), "max_lora_rank": "8"}
    executor = Executor(
        tiny_model("llama_wide"), EngineConfig(max_num_sequences=MAX_NUM_SEQUENCES, options=options)
    )
    executor.load_adapter("formal", str(write_small_adapter(model / "formal", seed=1)))
    return executor


def vllm() -> Executor:
    from handlers.lmi_vllm import Executor

    return Executor(tiny_model("llama_wide"), vllm_config())


def vllm_with_adapters(model: Path) -> Executor:
    from handlers.lmi_vllm import Executor

    config = vllm_config(enable_lora="true", max_loras=str(MAX_ADAPTERS), max_lora_rank="8")
    executor = Executor(tiny_model("llama_wide"), config)
    executor.load_adapter("formal", str(write_small_adapter(model / "formal", seed=1)))
    return executor


def vllm_config(**options: str) -> EngineConfig:
    return EngineConfig(
        handler="vllm",
        options=options,
        dtype="fp32",
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=512,
        max_kv_cache_tokens=8192,
        **ASKED,
    )


@contextmanager
def trtllm(profile: str) -> Iterator[Executor]:
    """TensorRT-LLM's adapter over the double of a profile. An engine that takes beams would take
    nothing else.
    """
    with double(profile) as executor_class:
        config = trtllm_config(
            additional_outputs=("hidden_states:context",),
            logits_post_processors="processors.py",
            # For bad words of several tokens
            options={"disable_overlap_scheduler": "true"},
        )
        with executor_class(with_processors(tiny_model("llama_wide")), config) as executor:
            yield executor


@contextmanager
def trtllm_with_adapters(model: Path, profile: str) -> Iterator[Executor]:
    options = {"enable_lora": "true", "max_loras": str(MAX_ADAPTERS), "max_lora_rank": "8"}
    with double(profile) as executor_class:
        with executor_class(tiny_model("llama_wide"), trtllm_config(options=options)) as executor:
            executor.load_adapter("formal", str(write_small_adapter(model / "formal", seed=1)))
            yield executor


def trtllm_config(**settings: Any) -> EngineConfig:
    return EngineConfig(
        handler="trtllm",
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=512,
        max_kv_cache_tokens=8192,
        **ASKED | {"max_beam_width": 1} | settings,
    )


@dataclass(frozen=True)
class Adaptable:
    """An engine with the adapter `formal`; `write` makes another one in a new folder."""

    executor: Executor
    write: Callable[[Path], Path]


Opened = AbstractContextManager[Executor]
EXECUTORS: dict[str, Callable[[], Opened]] = {
    "echo": echo,
    "lmi-dist": lmi_dist,
    "foreign": foreign,
}
EXECUTORS |= {f"trtllm-{profile}": partial(trtllm, profile) for profile in PROFILES}
ADAPTABLE: dict[str, tuple[Callable[[Path], Opened], Callable[[Path], Path]]] = {
    "foreign": (foreign_with_adapters, lambda folder: write_foreign_adapter(folder, shift=2)),
    "lmi-dist": (lmi_dist_with_adapters, lambda folder: write_small_adapter(folder, seed=2)),
}
ADAPTABLE |= {
    f"trtllm-{profile}": (
        partial(trtllm_with_adapters, profile=profile),
        lambda folder: write_small_adapter(folder, seed=2),
    )
    for profile in PROFILES
}
if importlib.util.find_spec("vllm") is not None:
    ADAPTABLE["vllm"] = (vllm_with_adapters, lambda folder: write_small_adapter(folder, seed=2))
    EXECUTORS["vllm"] = vllm


@pytest.fixture(params=EXECUTORS, scope="package")
def shared(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """One executor for all tests of an engine, since loading is slow. Only tests that end it ask
    for `fresh`.
    """
    with EXECUTORS[request.param]() as executor:
        yield executor


def able(can: Capabilities, request: pytest.FixtureRequest) -> None:
    """Skip a test that needs what the engine lacks."""
    for mark in request.node.iter_markers("needs"):
        if not has(can, mark.args):
            pytest.skip(f"no {named(mark.args)}")


@pytest.fixture
def executor(shared: Executor, request: pytest.FixtureRequest) -> Executor:
    able(shared.capabilities, request)
    shared.await_responses(timeout_s=0)
    shared.get_latest_iteration_stats()
    shared.get_latest_request_stats()
    return shared


@pytest.fixture(params=EXECUTORS)
def fresh(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with EXECUTORS[request.param]() as executor:
        yield executor


@pytest.fixture(params=ADAPTABLE, scope="package")
def shared_adaptable(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adaptable]:
    load, write = ADAPTABLE[request.param]
    with load(tmp_path_factory.mktemp("adaptable")) as executor:
        yield Adaptable(executor, write)


@pytest.fixture
def adaptable(shared_adaptable: Adaptable, request: pytest.FixtureRequest) -> Adaptable:
    able(shared_adaptable.executor.capabilities, request)
    return shared_adaptable
