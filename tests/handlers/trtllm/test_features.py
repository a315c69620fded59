"""What only this engine refuses, or reads, beside tokens. The conformance suite has what all
engines do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import ModelUnusable, Unsupported
from lmi.executor import LoraConfig, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.conformance.asking import ask
from tests.handlers.trtllm.asking import FAMILY, answers, start, tokens, until
from tests.handlers.trtllm.double import double
from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import tiny_model

FILE = """
from lmi.executor import LogitsPostProcessorConfig

def fail_at_third(request_id, logits, tokens, stream, client_id):
    if len(tokens[0]) == 2:
        raise ValueError("enough")

logits_post_processors = LogitsPostProcessorConfig({"fail_at_third": fail_at_third})
"""


@pytest.fixture(scope="module", params=["main-2025-10", "main-2026-08"])
def executor_class(request: pytest.FixtureRequest) -> Iterator[Any]:
    with double(request.param) as executor_class:
        yield executor_class


def test_with_the_overlap_scheduler_only_words_of_several_tokens_are_refused(
    executor_class: Any,
) -> None:
    with start(executor_class) as executor:
        plain = tokens(executor)
        assert plain[2] not in tokens(executor, bad_words=((plain[2],),))
        with pytest.raises(Unsupported, match=r"bad_words .*option.disable_overlap_scheduler=true"):
            executor.enqueue_request(ask(bad_words=((4, 5),)))


def test_a_request_whose_post_processor_failed_holds_no_place_in_the_engine(
    executor_class: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model(FAMILY), tmp_path / "model")
    (folder / "post.py").write_text(FILE)
    config = EngineConfig(handler="trtllm", max_beam_width=1, logits_post_processors="post.py")
    with executor_class(folder, config) as executor:
        engine = executor._trtllm._llm._engine
        before = engine._num_steps
        answers(executor, logits_post_processor_name="fail_at_third", max_tokens=400)
        until(lambda: not engine._active)
        assert engine._num_steps - before < 100


def test_an_output_that_the_model_lacks_stops_the_start(executor_class: Any) -> None:
    config = EngineConfig(handler="trtllm", max_beam_width=1, additional_outputs=("attentions",))
    with pytest.raises(Exception, match="attentions"):
        executor_class(tiny_model(FAMILY), config)


def test_a_tokenizer_that_cannot_be_read_stops_the_start_with_one_line(
    executor_class: Any, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(FAMILY), tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnusable, match="^[^\\n]*TensorRT-LLM cannot start: [^\\n]*$"):
        executor_class(model, EngineConfig(handler="trtllm", max_beam_width=1))


def test_an_engine_that_only_searches_beams_loads_adapters_too(
    executor_class: Any, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "first", 1)
    with start(executor_class, max_beam_width=2, enable_lora="true") as executor:
        executor.load_adapter("first", str(folder))
        beams = SamplingConfig(2)
        assert len(tokens(executor, lora_config=LoraConfig("first"), sampling_config=beams)) == 8
