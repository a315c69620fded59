"""The arguments of an Executor over a library, which takes both forms of a configuration."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from handlers.base.configuration import settled
from lmi.errors import Unsupported
from lmi.executor import ExecutorConfig, GuidedDecodingConfig, KvCacheConfig
from lmi.settings.config import EngineConfig


def test_an_executor_takes_both_forms_of_a_configuration() -> None:
    executor_config = ExecutorConfig(
        4, kv_cache_config=KvCacheConfig(enable_block_reuse=False, max_tokens=64)
    )
    for arguments in ((executor_config, None), (None, executor_config)):
        model, settings, options = settled("A library", Path("/m"), *arguments)
        assert (model, settings.max_beam_width, options.max_beam_width) == ("/m", 4, 4)
        assert (options.enable_prefix_caching, options.max_kv_cache_tokens) == (False, 64)

    engine = EngineConfig(max_num_sequences=3)
    assert settled("A library", "/m", None, engine)[2] is engine


@pytest.mark.parametrize(("model", "text"), [(b"engine", None), ("/m", "{}")])
def test_a_buffer_is_refused_by_the_name_of_the_library(
    model: str | bytes, text: str | None
) -> None:
    with pytest.raises(
        Unsupported, match="engine_buffer .*A library reads a model from its folder"
    ):
        settled("A library", model, text, None)


def test_an_executor_needs_no_vocabulary_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        settled(
            "A library",
            "/m",
            ExecutorConfig(guided_decoding_config=GuidedDecodingConfig(("a",))),
            None,
        )

    [line] = caplog.messages
    assert line == "guided_decoding_config is not needed: A library reads the model's own tokenizer"
