"""Cached prompts that outlive the engine: the same bits, and only where all is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from handlers.lmi_dist.executor import EmbeddedExecutor
from handlers.lmi_dist.native.records import TOKENS_PER_BLOCK
from lmi.errors import BadConfiguration
from lmi.executor import LoraConfig, OutputConfig, Request, Response, Result, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import tiny_model

TIMEOUT_S = 120.0
# Three blocks, and a part of one
PROMPT = tuple(range(3, 3 + 3 * TOKENS_PER_BLOCK + 20))
WHOLE_BLOCKS = 3 * TOKENS_PER_BLOCK
REQUEST = Request(
    input_token_ids=PROMPT,
    max_tokens=8,
    ignore_eos=True,
    sampling_config=SamplingConfig(seed=3),
    output_config=OutputConfig(return_log_probs=True),
)


def engine(folder: Path, model: Path | None = None, **settings: Any) -> EmbeddedExecutor:
    config = EngineConfig(max_num_sequences=4, prefix_cache_dir=str(folder), **settings)
    return EmbeddedExecutor(model or tiny_model("llama_wide"), config)


def answer(executor: EmbeddedExecutor, request: Request = REQUEST) -> Result:
    request_id = executor.enqueue_request(request)
    [response] = executor.await_responses(request_id, TIMEOUT_S)
    assert isinstance(response, Response) and response.result is not None, response
    return response.result


def warmed(folder: Path, request: Request = REQUEST, **settings: Any) -> Result:
    """The answer of an engine that leaves its blocks in the folder."""
    with engine(folder, **settings) as executor:
        return answer(executor, request)


def bits(result: Result) -> tuple[Any, ...]:
    return result.output_token_ids, result.log_probs


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_prompt_is_cached_after_a_restart_and_gives_the_same_bits(
    tmp_path: Path, dtype: str
) -> None:
    cold = warmed(tmp_path, dtype=dtype)
    assert cold.num_cached_tokens == 0

    with engine(tmp_path, dtype=dtype) as executor:
        restored = answer(executor)
        warm = answer(executor)

    assert restored.num_cached_tokens == WHOLE_BLOCKS
    assert warm.num_cached_tokens >= WHOLE_BLOCKS
    assert bits(restored) == bits(cold) == bits(warm)


def test_a_prompt_comes_back_that_others_have_driven_out_of_the_cache(tmp_path: Path) -> None:
    others = [
        replace(REQUEST, input_token_ids=tuple(reversed(PROMPT))),
        replace(REQUEST, input_token_ids=(5, *PROMPT)),
    ]
    # It has room for one of the prompts and its answer
    num_tokens = 5 * TOKENS_PER_BLOCK
    with engine(tmp_path, max_kv_cache_tokens=num_tokens) as executor:
        cold = answer(executor)
        for request in others:
            assert answer(executor, request).num_cached_tokens == 0

        restored = answer(executor)

    assert restored.num_cached_tokens == WHOLE_BLOCKS
    assert bits(restored) == bits(cold)


def test_an_answer_is_cached_after_a_restart_as_its_prompt_is(tmp_path: Path) -> None:
    request = replace(REQUEST, max_tokens=2 * TOKENS_PER_BLOCK)
    [token_ids] = warmed(tmp_path, request).output_token_ids

    # The next turn of a chat has all of it in its prompt
    following = replace(REQUEST, input_token_ids=(*PROMPT, *token_ids, 7))
    num_known = len(PROMPT) + len(token_ids)
    num_whole = num_known // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert warmed(tmp_path, following).num_cached_tokens == num_whole


def other_weights(folder: Path) -> Path:
    """The same model with one number changed."""
    shutil.copytree(tiny_model("llama_wide"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_the_blocks_of_other_weights_or_another_precision_are_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    warmed(folder)

    changed = other_weights(tmp_path / "changed")
    assert warmed(folder, model=changed).num_cached_tokens == 0
    assert warmed(folder, quantize="int8").num_cached_tokens == 0
    assert warmed(folder, dtype="bf16").num_cached_tokens == 0
    assert warmed(folder).num_cached_tokens == WHOLE_BLOCKS


def test_a_salt_keeps_prompts_apart_on_disk_too(tmp_path: Path) -> None:
    ours = replace(REQUEST, cache_salt="ours")
    warmed(tmp_path, ours)

    with engine(tmp_path) as executor:
        assert answer(executor).num_cached_tokens == 0
        assert answer(executor, replace(REQUEST, cache_salt="yours")).num_cached_tokens == 0
        assert answer(executor, ours).num_cached_tokens == WHOLE_BLOCKS


def test_prompts_of_adapters_are_known_by_the_weights_and_not_by_the_name(tmp_path: Path) -> None:
    adapters = {seed: write_adapter(tmp_path / str(seed), seed) for seed in (1, 2)}
    folder = tmp_path / "prefixes"
    request = replace(REQUEST, lora_config=LoraConfig("mine"))

    def ask(seed: int) -> Result:
        options = {"enable_lora": "true", "max_lora_rank": "8"}
        with engine(folder, options=options) as executor:
            # It has another number than its like of the engine before
            executor.load_adapter("other", str(adapters[3 - seed]))
            executor.unload_adapter("other")
            executor.load_adapter("mine", str(adapters[seed]))
            return answer(executor, request)

    cold = ask(1)
    assert cold.num_cached_tokens == 0
    assert ask(2).num_cached_tokens == 0

    restored = ask(1)
    assert restored.num_cached_tokens == WHOLE_BLOCKS
    assert bits(restored) == bits(cold)
    assert warmed(folder).num_cached_tokens == 0


def test_a_block_that_the_disk_has_lost_is_computed_again_with_all_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = warmed(tmp_path)
    # Each was used a little earlier than the one before it
    files = sorted(tmp_path.rglob("*.kv"), key=lambda file: -file.stat().st_mtime_ns)
    files[1].write_bytes(files[1].read_bytes()[:1000])

    with engine(tmp_path) as executor:
        restored = answer(executor)

    assert restored.num_cached_tokens == TOKENS_PER_BLOCK
    assert bits(restored) == bits(cold)
    assert f"{files[1]} is left out and removed" in caplog.text
    assert warmed(tmp_path).num_cached_tokens == WHOLE_BLOCKS


def test_a_folder_that_cannot_be_used_is_an_error_of_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadConfiguration, match=r"^option\.prefix_cache_dir=/.*: FileExistsError"):
        engine(file)


def test_an_engine_that_shares_no_prompts_says_that_the_option_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "prefixes"
    for settings in ({"enable_prefix_caching": False}, {"model": tiny_model("olmo2")}):
        assert warmed(folder, **settings).num_cached_tokens == 0
        assert "option.prefix_cache_dir has no effect" in caplog.text
        caplog.clear()

    assert not folder.exists()
