"""The engine's end of the process that compiles guides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from handlers.guides.compiler import GuideCompiler, TooSlow, compile_limit_s
from handlers.guides.process import Start, max_compile_bytes
from lmi.errors import InvalidRequest, Unavailable
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType
from lmi.shared import machine
from tests.machine import MAX_TRIES

VOCABULARY = GuidedDecodingConfig(["<end>", "a", "b"], stop_token_ids=[0])
TIMEOUT_S = 120.0
EXPLODING = GuidedDecodingParams(
    GuideType.JSON_SCHEMA,
    '{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}',
)


def regex(text: str) -> GuidedDecodingParams:
    return GuidedDecodingParams(GuideType.REGEX, text)


@contextmanager
def compiler_with(max_compile_s: float, later_s: float | None = None) -> Iterator[GuideCompiler]:
    """`later_s` is the limit from the start of the process on; the wait for that start has the
    other one.
    """

    def read_config() -> GuidedDecodingConfig:
        compiler.start.max_compile_s = later_s or max_compile_s
        return VOCABULARY

    with closing(GuideCompiler(read_config, Start(3, max_compile_s))) as compiler:
        yield compiler


def short_limit_s() -> float:
    """A limit that this machine, as busy as it is, keeps for a small guide."""
    with compiler_with(TIMEOUT_S) as compiler:
        compiler.compile(regex("a"))
        started_s = time.monotonic()
        for number in range(5):
            compiler.compile(regex(f"a{{{number}}}"))

        return max(0.1, 2 * (time.monotonic() - started_s))


def test_all_waits_for_a_guide_together_are_no_longer_than_a_step() -> None:
    for step_timeout_s in (1.0, 4.0, 60.0, 3600.0):
        limit_s = compile_limit_s(step_timeout_s)
        start_s = 2 * limit_s
        compile_s = 1.5 * limit_s
        probe_s = limit_s / 2
        assert start_s + compile_s + probe_s <= step_timeout_s and compile_s <= 22.5


def test_a_start_that_is_slow_fails_the_guide_and_goes_on_for_the_next() -> None:
    with compiler_with(0.02, TIMEOUT_S) as compiler:
        with pytest.raises(Unavailable, match=r"still starts after 0\.04 s; try again"):
            compiler.compile(regex("a{3}"))

        starting = compiler._process
        compiler.compile(regex("a{3}"))
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

        assert hanging.popen.poll() is not None

        compiler.start.max_compile_s = TIMEOUT_S
        compiler.compile(regex("a"))


def test_a_process_that_hangs_is_ended_in_time_and_the_next_guide_starts_another() -> None:
    with compiler_with(TIMEOUT_S) as compiler:
        compiler.compile(regex("a{3}"))
        hanging = compiler._process
        assert hanging is not None

        compiler.start.max_compile_s = 0.1
        os.kill(hanging.popen.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="the process that compiles guides hung"):
            compiler.compile(regex("b"))

        assert hanging.popen.poll() is not None

        compiler.start.max_compile_s = TIMEOUT_S
        compiler.compile(regex("b"))


def test_a_guide_that_is_late_by_the_clock_ends_by_itself_and_may_be_tried_again() -> None:
    # Again if the machine gets so much busier meanwhile that a small guide is late too
    for _ in range(MAX_TRIES):
        limit_s = short_limit_s()
        with compiler_with(TIMEOUT_S, limit_s) as compiler, suppress(Unavailable, TooSlow):
            compiler.compile(regex("a"))
            process = compiler._process
            with pytest.raises(TooSlow, match=f"to compile it takes more than {limit_s:g} s here"):
                compiler.compile(EXPLODING)

            compiler.compile(regex("b"))
            assert compiler._process is process, "nobody else was harmed"

            return

    raise AssertionError("the process was ended with the guide")


def chain(num: int, link: str) -> str:
    """A schema of definitions that refer to each other, one below the other."""
    inner = {
        str(
            number
        ): f'{{"type": "object", "properties": {{"a": {{"$ref": "#/$defs/{number + 1}"}}}}}}'
        if link == "properties"
        else f'{{"{link}": [{{"$ref": "#/$defs/{number + 1}"}}]}}'
        for number in range(num)
    }
    defs = ", ".join(f'"{name}": {schema}' for name, schema in inner.items())
    return f'{{"$defs": {{{defs}, "{num}": {{"type": "null"}}}}, "$ref": "#/$defs/0"}}'


def rules(num: int, body: str) -> str:
    return (
        "".join(f"x{number} ::= {body.format(number + 1)}\n" for number in range(num))
        + f'x{num} ::= "a"'
    )


HOSTILE = {
    "references": (GuideType.JSON_SCHEMA, chain(5_000, "properties")),
    "allOf": (GuideType.JSON_SCHEMA, chain(5_000, "allOf")),
    "levels": (GuideType.JSON_SCHEMA, '{"items": ' * 5_000 + "{}" + "}" * 5_000),
    "multiples": (GuideType.JSON_SCHEMA, EXPLODING.guide),
    "values": (GuideType.JSON_SCHEMA, f'{{"enum": [{", ".join(f"[{number}]" for number in range(200_000))}]}}'),  # noqa: E501
    "rules": (GuideType.EBNF_GRAMMAR, f"root ::= x0\n{rules(20_000, 'x{0}')}"),
    "doubling rules": (GuideType.EBNF_GRAMMAR, f"root ::= x0\n{rules(99, 'x{0} x{0}')}"),
    "counts": (GuideType.EBNF_GRAMMAR, 'root ::= "a"' + "*" * 5_000),
    "parentheses": (GuideType.REGEX, "(" * 50_000 + "a" + ")" * 50_000),
    "letters": (GuideType.REGEX, "a" * 1_000_000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_guide_is_refused_or_followed_and_the_process_lives(
    hostile: GuideCompiler, name: str
) -> None:
    process = hostile._process
    with suppress(InvalidRequest):
        hostile.compile(GuidedDecodingParams(*HOSTILE[name]))

    hostile.compile(regex("ab"))
    assert hostile._process is process is not None


@pytest.fixture(scope="module")
def hostile() -> Iterator[GuideCompiler]:
    with compiler_with(TIMEOUT_S) as compiler:
        compiler.compile(regex("a"))
        yield compiler


def test_all_compilations_together_take_an_eighth_of_the_memory_at_most() -> None:
    assert 4 * max_compile_bytes() <= min(1 << 30, machine.memory_bytes() // 8)


def test_the_process_imports_neither_torch_nor_numpy() -> None:
    heavy = ("torch", "numpy", "tokenizers")
    our_modules = "handlers.guides.process, handlers.guides.text"
    code = f"import sys, {our_modules}; print([one for one in {heavy} if one in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_an_engine_imports_llguidance_only_with_its_first_guide() -> None:
    code = (
        "import sys, handlers.lmi_dist.guides; print([n for n in ('torch', 'llguidance') if n "
        "in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
