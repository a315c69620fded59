"""A tokenizer with parts that are not known: its texts are bounded, and nobody else
waits for them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from lmi.errors import GenerationFailed, InvalidParameter, ModelUnusable
from lmi.text import confined
from lmi.text.tokenizer import MAX_TOKEN_CHARS, Tokenizer
from lmi.text.turn_budget import MAX_INLINE_CHARS
from tests.text.small_tokenizers import byte_level_backend, poisoned_backend

# Each row costs half a million steps
POISON = ("ac" * 18 + "! ") * 100
TEXTS = [
    "Hello world",
    " leading",
    "世界 😀\n\n",
    "<|im_start|>user<tool></s>",
    "a  b\tc",
    "é" * 3000,
]


def backend_with(pattern: str) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    first = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, backend.pre_tokenizer])
    return backend


@pytest.fixture(scope="module")
def poisoned() -> Tokenizer:
    return Tokenizer(poisoned_backend())


@pytest.fixture
def quick_bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(confined, "MAX_CPU_S", 0.2)
    monkeypatch.setattr(confined, "MAX_CPU_S_PER_CHAR", 0.0)
    yield


def process_of(tokenizer: Tokenizer) -> subprocess.Popen[bytes]:
    assert tokenizer._confined is not None and tokenizer._confined._process is not None
    return tokenizer._confined._process


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(a+)+$", r"(\w+)+!", "(?:qz|qz)*k"])
def test_a_pattern_that_takes_for_ever_is_refused_when_it_is_loaded(pattern: str) -> None:
    with pytest.raises(
        ModelUnusable,
        match="the tokenizer has a pre-tokenizer with the pattern .*: .* for a text of",
    ):
        Tokenizer(backend_with(pattern))


@pytest.mark.usefixtures("quick_bound")
def test_a_text_that_takes_too_long_fails_alone_and_nobody_waits_for_it(
    poisoned: Tokenizer,
) -> None:
    async def count_turns() -> int:
        work = asyncio.create_task(poisoned.encode_async(POISON))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1

        with pytest.raises(
            GenerationFailed, match=r"gave up on this text: it took over 0\.2 s of CPU time"
        ):
            await work

        return turns

    assert len(POISON) < MAX_INLINE_CHARS
    assert asyncio.run(count_turns()) > 20
    assert poisoned.encode("Hello world") == byte_level_backend().encode("Hello world").ids


def test_a_text_that_grows_without_end_ends_another_process() -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.Replace("q", 1_000_000 * "b")
    encoder = confined.ConfinedEncoder(backend)
    with pytest.raises(GenerationFailed, match="took (too much memory|over)"):
        encoder.encode(4000 * "q", add_special_tokens=True, spells_special_tokens=False)

    assert encoder.encode("a", add_special_tokens=True, spells_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("forged", [(), (4, 7)])
def test_another_process_gives_the_same_ids(
    poisoned: Tokenizer, text: str, forged: tuple[int, ...]
) -> None:
    plain_tokenizer = Tokenizer(byte_level_backend())
    assert poisoned.encode(text, forged=forged) == plain_tokenizer.encode(text, forged=forged)
    assert poisoned.special_texts == plain_tokenizer.special_texts
    assert asyncio.run(poisoned.spellings_async(["dog"])) == plain_tokenizer.spellings("dog")


def test_a_lone_surrogate_is_refused_before_it_is_sent(poisoned: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        poisoned.encode("a\ud800")


def test_a_process_that_was_killed_is_started_again(poisoned: Tokenizer) -> None:
    poisoned.encode("a")
    process = process_of(poisoned)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(GenerationFailed, match="gave up"):
        poisoned.encode("a")

    assert poisoned.encode("a") == byte_level_backend().encode("a").ids
    assert process_of(poisoned) is not process and process.returncode == -signal.SIGKILL


def test_a_process_that_does_not_answer_is_killed(
    poisoned: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "MAX_WALL_S", 0.1)
    poisoned.encode("a")
    os.kill(process_of(poisoned).pid, signal.SIGSTOP)
    with pytest.raises(GenerationFailed, match="gave up"):
        poisoned.encode("a")


def test_the_process_ends_with_its_tokenizer() -> None:
    tokenizer = Tokenizer(poisoned_backend())
    process = process_of(tokenizer)
    del tokenizer
    gc.collect()
    assert process.returncode is not None


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = (
        "from lmi.text.tokenizer import Tokenizer; from tests.text.small_tokenizers import "
        "poisoned_backend; import os;"
        "tokenizer = Tokenizer(poisoned_backend()); print(tokenizer._confined._process.pid, "
        "flush=True); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    process = Path(f"/proc/{int(done.stdout)}")
    deadline_s = time.monotonic() + 60
    while process.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)

    assert not process.exists()


def test_a_decoder_that_is_not_known_is_refused() -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.Replace(Regex("(a+)+b"), "")
    with pytest.raises(ModelUnusable, match=r"a decoder with the pattern '\(a\+\)\+b'"):
        Tokenizer(backend)


def test_a_token_of_a_great_length_is_refused() -> None:
    backend = byte_level_backend()
    backend.add_tokens([(MAX_TOKEN_CHARS + 1) * "x"])
    with pytest.raises(ModelUnusable, match=f"at most {MAX_TOKEN_CHARS} characters"):
        Tokenizer(backend)


def test_a_panic_writes_no_stack() -> None:
    script = (
        "import lmi.text.tokenizer; import tokenizers as t;"
        "b = t.Tokenizer(t.models.WordLevel({'a': 0}, unk_token='a'));"
        "b.pre_tokenizer = t.pre_tokenizers.Split(t.Regex('(a+)+$'), 'isolated'); b.encode(60 * "
        "'a' + 'c')"
    )
    environ = {**os.environ, "RUST_BACKTRACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ
    )

    assert "PanicException" in done.stderr
    assert "stack backtrace" not in done.stderr
