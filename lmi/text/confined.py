"""Encodes with a tokenizer that has parts which are not known, in a process that ends where a text
takes too long.

The library cannot be interrupted: a text would hold the event loop, or one of the threads for long
texts, for as long as it takes. So the time that a text may take is CPU time of another process
(`encoder.py`), which the kernel bounds. Before the first text, texts are tried that such parts
would take long for: who takes too long for one is refused.

The process encodes one text at once. Where a text has ended it, the next text starts another.
"""

import itertools
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import tokenizers

from lmi.errors import GenerationFailed, ModelUnusable
from lmi.text import encoder
from lmi.text.known_parts import UnknownPart

# Any text may take so much.
MAX_CPU_S = 1.0
# A long text may take more: 100 times what a usual tokenizer takes.
MAX_CPU_S_PER_CHAR = 20e-6
# Ends a process that gets no CPU, or is stopped.
MAX_WALL_S = 60.0
MAX_START_S = 60.0

# What is tried when a tokenizer is loaded.
PROBE_CHARS = 4096
MAX_PROBING_S = 10.0
USUAL_ROWS = (
    "a",
    "A",
    "1",
    " ",
    "\n",
    "\t",
    "!",
    "é",
    "世",
    "\u0301",
    "a ",
    "aA",
    "1a",
    " \n",
    "ab1 ",
    "<|a|>",
)
# Rows are made of the first characters of a pattern.
MAX_PATTERN_CHARS = 1000

WORDS = re.compile(r"\w+|[^\w\s]")


class Encoded(NamedTuple):
    """The ids of a text, and between which characters each lies, where that was asked for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class ConfinedEncoder:
    """A process that encodes with one tokenizer, for all threads in turn."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._state = backend.to_str().encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] | None = None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        spells_special_tokens: bool,
        has_offsets: bool = False,
        max_cpu_s: float | None = None,
    ) -> Encoded:
        """Encode a text. With `spells_special_tokens` special tokens in it are only text.

        Raises GenerationFailed where that takes too long or too much memory, or the library fails.
        Raises UnicodeEncodeError for a lone surrogate.
        """
        data = text.encode()
        if max_cpu_s is None:
            max_cpu_s = MAX_CPU_S + MAX_CPU_S_PER_CHAR * len(text)

        flags = encoder.ADDS_SPECIAL_TOKENS * add_special_tokens
        flags |= encoder.SPELLS_SPECIAL_TOKENS * spells_special_tokens
        flags |= encoder.HAS_OFFSETS * has_offsets
        request = encoder.REQUEST.pack(flags, max_cpu_s, len(data)) + data

        with self._lock:
            process = self._process or self._start()
            try:
                status, answer = _answer_of(process, request, MAX_WALL_S)
            except (OSError, EOFError):
                raise GenerationFailed(self._reason(max_cpu_s)) from None

        if status == encoder.FAILED:
            raise GenerationFailed(answer.decode(errors="replace"))

        numbers = array("I", answer).tolist()
        if not has_offsets:
            return Encoded(numbers, [])

        num_ids = len(numbers) // 3
        starts = numbers[num_ids : 2 * num_ids]
        ends = numbers[2 * num_ids :]
        return Encoded(numbers[:num_ids], list(zip(starts, ends, strict=True)))

    def probe(self, unknown: Sequence[UnknownPart]) -> None:
        """Raise ModelUnusable for a tokenizer that takes too long for a short text."""
        patterns = [part.pattern for part in unknown]
        end_s = time.monotonic() + MAX_PROBING_S
        for text in probes_of(patterns):
            try:
                self.encode(
                    text, add_special_tokens=False, spells_special_tokens=False, max_cpu_s=MAX_CPU_S
                )
            except GenerationFailed as error:
                parts = "; ".join(part.what for part in unknown)
                about = f"a text of {len(text)} characters that begins {text[:8]!r}"
                raise ModelUnusable(f"the tokenizer has {parts}: {error} for {about}") from error

            if time.monotonic() > end_s:
                return

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process. A session of its own keeps signals to this process's group from it."""
        process = subprocess.Popen(
            [sys.executable, "-P", encoder.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)

        first_message = struct.pack("!I", len(self._state)) + self._state
        try:
            _answer_of(process, first_message, MAX_START_S)
        except (OSError, EOFError):
            raise GenerationFailed(
                f"the tokenizer's process does not start: {self._reason(0.0)}"
            ) from None

        return process

    def _reason(self, max_cpu_s: float) -> str:
        """Return why the process has not answered. The next text gets another."""
        assert self._process is not None
        assert self._end is not None
        process = self._process
        self._process = None
        self._end()

        if process.returncode == -signal.SIGPROF:
            return f"it took over {max_cpu_s:.1f} s of CPU time"

        if process.returncode == -signal.SIGABRT:
            return "it took too much memory"

        return f"it ended with {process.returncode}"


def probes_of(patterns: Iterable[str]) -> Iterator[str]:
    """Yield texts for which regular expressions may take long: rows of what they are written with,
    and their ends.
    """
    rows = list(USUAL_ROWS)
    # The library looks first whether a text has all that a pattern needs, so a text that does not
    # match has it too.
    ends = ["", "!", "\x00!"]
    for pattern in patterns:
        words = WORDS.findall(pattern[:MAX_PATTERN_CHARS])
        pairs = (first + second for first, second in itertools.pairwise(words))
        rows += [*"".join(words), *words, *pairs]
        ends[-1] += "".join(words)

    for row in dict.fromkeys(rows):
        for end in ends:
            yield row * (PROBE_CHARS // len(row)) + end


def _answer_of(
    process: subprocess.Popen[bytes], request: bytes, max_wall_s: float
) -> tuple[int, bytes]:
    """Send a request. Return the status and the data of the answer.

    Raises OSError or EOFError if the process ends before.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    watch = threading.Timer(max_wall_s, process.kill)
    watch.daemon = True
    watch.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()

        head = _read(process.stdout, encoder.ANSWER.size)
        status, length = encoder.ANSWER.unpack(head)
        return status, _read(process.stdout, length)
    finally:
        watch.cancel()


def _read(file: IO[bytes], length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise EOFError

    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    process.poll()
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        # What was not written yet cannot be written.
        with suppress(OSError):
            pipe.close()
