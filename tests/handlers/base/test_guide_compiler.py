"""The engine's end of the process that compiles guides."""

from __future__ import annotations

from contextlib import closing

import pytest

from handlers.base.guide_compiler import GuideCompiler
from lmi.errors import GenerationFailed
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType

VOCABULARY = GuidedDecodingConfig(["<end>", "a", "b"], stop_token_ids=[0])


def test_a_process_that_starts_too_slowly_is_started_again() -> None:
    guide = GuidedDecodingParams(GuideType.REGEX, "a{3}")
    with closing(GuideCompiler(lambda: VOCABULARY, vocab_size=3, max_wait_s=0.001)) as compiler:
        with pytest.raises(GenerationFailed, match=r"took more than 0\.001 s"):
            compiler.compile(guide)
        compiler.max_wait_s = 60.0
        assert compiler.compile(guide).num_bytes > 0
