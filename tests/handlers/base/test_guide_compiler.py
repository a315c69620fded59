"""The engine's end of the process that compiles guides."""

from __future__ import annotations

import os
import signal
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


def test_a_process_that_hangs_is_ended_and_the_next_guide_starts_another() -> None:
    with closing(GuideCompiler(lambda: VOCABULARY, vocab_size=3)) as compiler:
        compiler.compile(GuidedDecodingParams(GuideType.REGEX, "a{3}"))
        hanging = compiler._process
        assert hanging is not None
        hanging.max_wait_s = 0.1
        os.kill(hanging.popen.pid, signal.SIGSTOP)
        with pytest.raises(GenerationFailed, match=r"took more than 0\.1 s"):
            compiler.compile(GuidedDecodingParams(GuideType.REGEX, "b"))
        assert compiler.compile(GuidedDecodingParams(GuideType.REGEX, "b")).num_bytes > 0
        assert not hanging.is_alive()
