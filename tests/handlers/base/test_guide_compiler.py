"""The engine's end of the process that compiles guides."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from handlers.base.guide_compiler import GuideCompiler, TooSlow, compile_limit_s
from lmi.errors import Unavailable
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType

VOCABULARY = GuidedDecodingConfig(["<end>", "a", "b"], stop_token_ids=[0])
TIMEOUT_S = 120.0
EXPLODING = GuidedDecodingParams(
    GuideType.JSON_SCHEMA, '{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'
)


def regex(text: str) -> GuidedDecodingParams:
    return GuidedDecodingParams(GuideType.REGEX, text)


@contextmanager
def compiler_with(max_compile_s: float) -> Iterator[GuideCompiler]:
    with closing(GuideCompiler(lambda: VOCABULARY, 3, max_compile_s)) as compiler:
        yield compiler


def compile_at_last(compiler: GuideCompiler, text: str) -> None:
    """Compile a guide, again as long as the process or the machine is not ready for it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(Unavailable, TooSlow):
            compiler.compile(regex(text))
            return
    raise AssertionError("the guide was never compiled")


def test_all_waits_for_a_guide_together_are_no_longer_than_a_step() -> None:
    for step_timeout_s in (1.0, 4.0, 60.0, 3600.0):
        limit_s = compile_limit_s(step_timeout_s)
        start_s, compile_s, probe_s = 2 * limit_s, 1.5 * limit_s, limit_s / 2
        assert start_s + compile_s + probe_s <= step_timeout_s and compile_s <= 22.5


def test_a_start_that_is_slow_fails_the_guide_and_goes_on_for_the_next() -> None:
    with compiler_with(0.02) as compiler:
        with pytest.raises(Unavailable, match=r"still starts after 0\.04 s; try again"):
            compiler.compile(regex("a{3}"))
        starting = compiler._process
        compile_at_last(compiler, "a{3}")
        assert compiler._process is starting is not None


def test_a_start_that_never_ends_is_ended_and_the_next_guide_starts_another() -> None:
    with compiler_with(0.02) as compiler:
        with pytest.raises(Unavailable):
            compiler.compile(regex("a"))
        hanging = compiler._process
        assert hanging is not None
        os.kill(hanging.popen.pid, signal.SIGSTOP)
        hanging.started_s -= 61.0
        with pytest.raises(Unavailable, match="still starts"):
            compiler.compile(regex("a"))
        assert not hanging.is_alive()
        compile_at_last(compiler, "a")


def test_a_process_that_hangs_is_ended_in_time_and_the_next_guide_starts_another() -> None:
    with compiler_with(TIMEOUT_S) as compiler:
        compiler.compile(regex("a{3}"))
        hanging = compiler._process
        assert hanging is not None
        compiler.max_compile_s = 0.1
        os.kill(hanging.popen.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="the process that compiles guides hung"):
            compiler.compile(regex("b"))
        assert not hanging.is_alive()
        compiler.max_compile_s = TIMEOUT_S
        compiler.compile(regex("b"))


def test_a_guide_that_is_late_by_the_clock_ends_by_itself_and_may_be_tried_again() -> None:
    with compiler_with(0.1) as compiler:
        compile_at_last(compiler, "a")
        process = compiler._process
        with pytest.raises(TooSlow, match=r"to compile it takes more than 0\.1 s here"):
            compiler.compile(EXPLODING)
        compile_at_last(compiler, "b")
        assert compiler._process is process, "nobody else was harmed"
