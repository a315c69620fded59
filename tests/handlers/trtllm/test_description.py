"""What an engine says of itself, from its arguments and the model's folder."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import ModelUnusable, Unsupported
from lmi.executor import ExecutorConfig, LogitsPostProcessorConfig
from tests.handlers.trtllm.asking import start, tokens
from tests.handlers.trtllm.double import double
from tests.tiny_models import tiny_model


def folder_with(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_vocabulary_is_that_of_the_text_part_of_a_model(line: str, tmp_path: Path) -> None:
    executor = import_module("handlers.lmi_trtllm.executor")
    assert executor.read_config(folder_with(tmp_path, vocab_size=5))["vocab_size"] == 5
    assert (
        executor.read_config(folder_with(tmp_path, vocab_size=5, text_config={"vocab_size": 7}))[
            "vocab_size"
        ]
        == 7
    )


@pytest.mark.parametrize("text", ["{}", "{", '{"vocab_size": "7"}'])
def test_a_folder_that_does_not_say_it_is_refused(line: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelUnusable, match="config.json"):
        import_module("handlers.lmi_trtllm.executor").read_config(str(tmp_path))


def test_the_info_of_an_engine_is_honest_about_its_line(line: str) -> None:
    with double(line) as executor_class, start(executor_class) as executor:
        info = executor.info

    can = info.capabilities
    assert (info.name, info.vocab_size, info.max_sequence_length, info.max_num_sequences) == (
        "trtllm",
        320,
        512,
        4,
    )
    assert (info.dtype, info.device) == ("float32", "cuda")

    is_main = line == "main-2026-08"
    assert (can.seed, can.min_p, can.no_repeat_ngram_size, can.priority) == (is_main,) * 4
    assert (
        not can.typical_p
        and can.max_beam_width == 1
        and not can.lora
        and can.log_probs
        and can.prompt_log_probs
    )


def test_the_cpp_sampler_of_the_older_line_reads_every_rule_and_reports_chosen_tokens_only() -> (
    None
):
    with (
        double("main-2025-10") as executor_class,
        start(executor_class, sampler_type="TRTLLMSampler") as executor,
    ):
        can = executor.info.capabilities
        assert can.seed and can.min_p and can.no_repeat_ngram_size and can.max_top_log_probs == 0
        assert len(tokens(executor)) == 8


def test_the_contracts_own_configuration_starts_an_engine_and_buffers_and_functions_are_refused(
    line: str,
) -> None:
    with double(line) as executor_class:
        with executor_class(tiny_model("llama_wide"), ExecutorConfig(max_batch_size=3)) as executor:
            assert executor.info.max_num_sequences == 3 and len(tokens(executor)) == 8

        with pytest.raises(Unsupported, match="engine_buffer"):
            executor_class(b"", "{}")

        functions = ExecutorConfig(logits_post_processor_config=LogitsPostProcessorConfig())
        with pytest.raises(
            Unsupported, match="logits_post_processor_config .*option.logits_post_processors names"
        ):
            executor_class(tiny_model("llama_wide"), functions)
