"""The engines of this folder. Importing vLLM is slow, so all test files share them."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from handlers.lmi_vllm.process_setup import hide_foreign_builds
from lmi.executor import Executor
from tests.handlers.vllm.asking import start


@pytest.fixture(scope="module")
def arguments() -> ModuleType:
    hide_foreign_builds()
    with warnings.catch_warnings():
        # Warnings of libraries at their import
        warnings.simplefilter("ignore")
        import handlers.lmi_vllm.arguments as module

    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with only a configuration: 4 layers of 2 heads of 64 for keys and values, a context
    of 4096.
    """
    shape = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
    }

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "dtype": "float32",
    } | shape
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return tmp_path


@pytest.fixture(scope="session")
def shared() -> Iterator[Executor]:
    hide_foreign_builds()
    with start() as executor:
        yield executor


@pytest.fixture
def engine(shared: Executor) -> Executor:
    """vLLM with a cache that is too small for four long requests at once."""
    shared.await_responses(timeout_s=0)
    shared.get_latest_iteration_stats()
    return shared
