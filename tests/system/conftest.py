"""Servers that the tests of this folder share, since an engine takes seconds to import torch or
vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served import Server, serve
from tests.system.vllm_server import SETTINGS
from tests.tiny_models import tiny_model

TIGHT_TOKENS = 1024  # of KV cache


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """A small random Llama behind two front ends, with room for every request."""
    with serve(
        tiny_model("llama_deep"),
        "option.model_name=tiny",
        "option.dtype=fp32",
        "frontend_workers=2",
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tight() -> Iterator[Server]:
    """The checkpoint of `tiny`, TGI's shape, and a KV cache that holds one long request or some
    short ones.
    """
    settings = (
        "option.dtype=fp32",
        "option.tgi_compat=true",
        f"option.max_kv_cache_tokens={TIGHT_TOKENS}",
    )
    with serve(tiny_model("llama_deep"), *settings, "frontend_workers=1") as server:
        yield server


@pytest.fixture(scope="session")
def inside() -> Iterator[Server]:
    """The real vLLM with one rank, in the engine's process. Tests kill this engine, and wait for
    the next one. It has a long queue, and a client may say whose a request is.
    """
    overload = (
        "option.max_rolling_batch_size=32",
        "option.model_name=demo",
        "trust_fairness_id=true",
        "job_queue_size=5000",
    )
    with serve(tiny_model("llama_long"), *SETTINGS, *overload) as server:
        yield server


@pytest.fixture(scope="session")
def wide() -> Iterator[Server]:
    """The real vLLM for tests of its doors. It writes JSON without spaces: a random model often
    writes them.
    """
    compact = (
        'option.structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": true}'
    )
    settings = (
        "option.rolling_batch=vllm",
        "option.dtype=fp32",
        "option.max_kv_cache_tokens=8192",
        compact,
    )
    with serve(tiny_model("llama_wide"), *settings, "frontend_workers=1") as server:
        yield server
