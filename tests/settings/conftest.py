"""A folder to serve, and machines with and without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

VLLM_ARGUMENTS = (
    "enable_lora max_loras max_lora_rank gpu_memory_utilization enforce_eager load_format revision "
    "kv_cache_dtype "
    "enable_prefix_caching enable_chunked_prefill limit_mm_per_prompt disable_custom_all_reduce "
    "hf_overrides "
    "kv_transfer_config speculative_config fully_sharded_loras served_model_name tool_call_parser "
    "reasoning_parser "
    "max_num_seqs max_model_len runner seed trust_remote_code data_parallel_size"
).split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model's folder."""
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which vLLM is not installed."""
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM with these arguments, whose source can be read but not run."""
    engine = tmp_path / "site" / "vllm" / "engine"
    engine.mkdir(parents=True)
    (engine.parent / "__init__.py").write_text("raise RuntimeError('imported by the supervisor')")
    fields = "\n".join(f"    {name}: str = ''" for name in VLLM_ARGUMENTS)
    (engine / "arg_utils.py").write_text(
        f"from gpus import *\n@dataclass\nclass EngineArgs:\n    model: str = ''\n    _rank: int = "
        f"0\n{fields}\n"
        "@dataclass\nclass AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
        "class Other:\n    unrelated: int = 1\n"
    )
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
