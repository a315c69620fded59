"""The engine's end of the process that compiles guides."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from handlers.guides import process as gate
from handlers.guides.vocabulary import Vocabulary
from lmi.errors import InvalidRequest, Unavailable, cause_line
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

FIELD = "guided_decoding_params"
RULE = "must be a structure that lmi can follow"
# A process that has not started by then is started again.
MAX_START_S = 60.0
# A process hangs that takes so many times the limit of a compilation.
HANGS_AFTER = 1.5
MIN_WAIT_S = 0.001
# Address space for a compilation here. What passed with less in the process passes.
STACK_BYTES = 512 << 20

_STACK_LOCK = threading.Lock()

log = logging.getLogger(__name__)


class TooSlow(InvalidRequest):
    """A guide was not compiled in time; on a machine that is less busy it may be."""


def compile_limit_s(step_timeout_s: float) -> float:
    """How long a guide may take to compile: all waits together stay within the time of a step."""
    return min(gate.MAX_COMPILE_S, step_timeout_s / 4)


class Compiled(Struct):
    """A guide that sequences can follow, each with a copy of the matcher. `vocabulary` is the
    engine's.
    """

    matcher: LLMatcher
    vocabulary: Vocabulary
    # A copy has failed, and others may because of the states that they share.
    is_spent: bool = False


class Wait:
    """The wait for one guide, which another thread may end."""

    def __init__(self) -> None:
        self.is_over = False
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def use(self, connection: socket.socket | None) -> None:
        """From now on `end` closes this connection."""
        with self._lock:
            self._connection = connection
            if self.is_over and connection is not None:
                connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End the wait now, and what comes after it."""
        with self._lock:
            self.is_over = True
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)


class _Process(Struct):
    popen: subprocess.Popen[bytes]
    control: socket.socket
    # A time of `time.monotonic()`.
    started_s: float
    is_ready: bool = False

    def ask(self, message: bytes, timeout_s: float, wait: Wait) -> bytes:
        """Send a message over a new connection. Returns the answer, b"" if there is none. Raises
        TimeoutError.
        """
        connection, its_end = socket.socketpair()
        with connection, its_end:
            connection.settimeout(max(timeout_s, MIN_WAIT_S))
            try:
                socket.send_fds(self.control, [b"."], [its_end.fileno()])
                its_end.close()

                wait.use(connection)
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                return gate.read_all(connection)
            except TimeoutError:
                raise
            except OSError:
                # The process or the wait has ended.
                return b""
            finally:
                wait.use(None)

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers at all. Raises TimeoutError."""
        return self.ask(gate.PROBE, timeout_s, Wait()) == gate.COMPILED

    def close(self) -> None:
        self.control.close()
        self.popen.kill()
        self.popen.wait()


class GuideCompiler:
    """Compiles guides. The process starts with the first one. Safe to use from several threads."""

    def __init__(
        self,
        read_config: Callable[[], GuidedDecodingConfig],
        start: gate.Start,
        max_start_wait_s: float | None = None,
    ) -> None:
        """`read_config` gives the vocabulary; it is called once, with the first guide.

        A guide waits at most `max_start_wait_s`, or twice the time of a guide, for the start of the
        process, which goes on for the next guide.
        """
        self.start = start
        self._config = cache(read_config)
        self._max_start_wait_s = max_start_wait_s
        self._vocabulary: Vocabulary | None = None
        self._process: _Process | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def compile(self, params: GuidedDecodingParams, wait: Wait | None = None) -> Compiled:
        """Raises InvalidRequest for a guide that is wrong or too large, Unavailable if the process
        is not there.
        """
        text = self.check(params, wait or Wait())

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._config(), self.start.vocab_size)

            vocabulary = self._vocabulary

        return Compiled(_new_template(vocabulary, text), vocabulary)

    def check(self, params: GuidedDecodingParams, wait: Wait) -> str:
        """Compile a guide for an engine that compiles it again, without limits. Raises what
        `compile` raises.

        Returns what the process has made of it, for llguidance.
        """
        process = self._ready()
        max_compile_s = self.start.max_compile_s
        started_s = time.monotonic()
        try:
            message = msgspec.msgpack.encode(params)
            answer = process.ask(message, HANGS_AFTER * max_compile_s, wait)
            if wait.is_over:
                raise Unavailable("nobody waits for the guide any more")

            is_there = bool(answer) or process.answers(max_compile_s / 2)
        except TimeoutError as error:
            # A fork would have been ended by its limits.
            process.close()
            raise Unavailable(
                "the process that compiles guides hung; the next guide starts it again"
            ) from error

        if answer[:1] == gate.COMPILED:
            return answer[1:].decode()

        if answer[:1] == gate.REFUSED:
            raise InvalidRequest(f"{RULE}: {cause_line(Exception(answer[1:].decode()))}", FIELD)

        if not is_there:
            raise Unavailable(
                "the process that compiles guides has ended; the next guide starts it again"
            )

        if time.monotonic() - started_s >= max_compile_s:
            raise TooSlow(f"{RULE}: to compile it takes more than {max_compile_s:g} s here", FIELD)

        cpu_s = self.start.max_cpu_s
        memory_mb = self.start.max_bytes >> 20
        text_mb = gate.MAX_TEXT_BYTES >> 20
        limits = f"{cpu_s} s, or {memory_mb} MiB, or it is larger than {text_mb} MiB"
        raise InvalidRequest(f"{RULE}: to compile it takes more than {limits} then", FIELD)

    def close(self) -> None:
        """End the process, with all that it compiles."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()

    def _ready(self) -> _Process:
        """The process, which has started. Raises Unavailable if it has not in time, or if it has
        ended.
        """
        max_wait_s = self._max_start_wait_s or 2 * self.start.max_compile_s
        deadline_s = time.monotonic() + max_wait_s
        still_starts = (
            f"the process that compiles guides still starts after {max_wait_s:g} s; try again"
        )
        if not self._lock.acquire(timeout=max_wait_s):
            raise Unavailable(still_starts)

        try:
            if self._process is not None and self._process.popen.poll() is not None:
                self._process.close()
                self._process = None

            self._process = self._process or self._new_process()
            process = self._process
        finally:
            self._lock.release()

        if self._is_closed:
            process.close()

        try:
            if not process.is_ready:
                process.is_ready = process.answers(deadline_s - time.monotonic())
        except TimeoutError as error:
            if time.monotonic() - process.started_s > MAX_START_S:
                process.close()

            raise Unavailable(still_starts) from error

        if not process.is_ready:
            raise Unavailable(
                "the process that compiles guides did not start; its reason is in the log"
            )

        return process

    def _new_process(self) -> _Process:
        self.start.config = self._config()
        control, its_end = socket.socketpair()
        with its_end, os.fdopen(os.memfd_create("guides"), "wb+") as file:
            file.write(msgspec.msgpack.encode(self.start))
            file.seek(0)

            fds = [its_end.fileno(), file.fileno()]
            argv = [sys.executable, "-m", "handlers.guides.process", *map(str, fds)]
            # A second arena would reserve more memory than the limit.
            environ = {**os.environ, "MALLOC_ARENA_MAX": "1"}
            try:
                popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds, env=environ)
            except OSError:
                control.close()
                raise

        log.info("guided decoding: process %d compiles guides", popen.pid)
        return _Process(popen, control, time.monotonic())


def _new_template(vocabulary: Vocabulary, text: str) -> LLMatcher:
    """What the copies of a guide share. With its first mask it knows what each of them
    needs first.
    """
    from handlers.guides.matcher import new_matcher

    def make() -> LLMatcher:
        # The process has made it too, within its limits.
        matcher = new_matcher(vocabulary.tokenizer, text)
        matcher.compute_bitmask()
        return matcher

    with ThreadPoolExecutor(1, thread_name_prefix="guide") as pool:
        with _STACK_LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                future = pool.submit(make)
            finally:
                threading.stack_size(before)

        return future.result()
