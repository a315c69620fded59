"""The engine's end of the process that compiles guides."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from handlers.base.guide_process import (
    COMPILED,
    MAX_COMPILE_BYTES,
    MAX_COMPILE_S,
    MAX_COMPILED_BYTES,
    PROBE,
    REFUSED,
    Start,
    read_all,
)
from handlers.base.guide_vocabulary import Vocabulary
from lmi.errors import InvalidRequest, Unavailable, cause_line
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

FIELD = "guided_decoding_params"
RULE = "must be a structure that xgrammar can follow"
MAX_COMPILE_WAIT_S = 15.0  # by the clock, on a machine that gives the process little time
MAX_START_S = 60.0  # then the process is started again
HANGS_AFTER = 1.5  # times the limit of a compile
MIN_WAIT_S = 0.001
PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # a line of the compiler's code: [04:07:14] /x/regex.cc:83:

log = logging.getLogger(__name__)


class TooSlow(InvalidRequest):
    """A guide was not compiled in time; on a machine that is less busy it may be."""


def compile_limit_s(step_timeout_s: float) -> float:
    """How long a guide may take to compile: all waits together stay within the time of a step."""
    return min(MAX_COMPILE_WAIT_S, step_timeout_s / 4)


@dataclass(slots=True)
class Compiled:
    """A guide that sequences can follow. `vocabulary` is the engine's."""

    grammar: CompiledGrammar
    vocabulary: Vocabulary

    @property
    def num_bytes(self) -> int:
        return self.grammar.memory_size_bytes


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    control: socket.socket
    vocabulary: Vocabulary
    started_s: float  # time.monotonic()
    is_ready: bool = False

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Send a message over a new connection. Returns the answer, b"" if there is none. Raises TimeoutError."""
        ours, its = socket.socketpair()
        with ours, its:
            ours.settimeout(max(timeout_s, MIN_WAIT_S))
            try:
                socket.send_fds(self.control, [b"."], [its.fileno()])
                its.close()
                ours.sendall(message)
                ours.shutdown(socket.SHUT_WR)
                return read_all(ours)
            except TimeoutError:
                raise
            except OSError:  # the process has ended
                return b""

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        self.control.close()
        self.end()


class GuideCompiler:
    """Compiles guides. The process starts with the first one. Safe to use from several threads."""

    def __init__(
        self,
        read_config: Callable[[], GuidedDecodingConfig],
        vocab_size: int,
        max_compile_s: float = MAX_COMPILE_WAIT_S,
    ) -> None:
        """`read_config` gives the vocabulary; it is called with the first guide. `vocab_size` is that of the logits.

        A guide waits at most twice `max_compile_s` for the start of the process, which goes on for the next guide.
        """
        self.max_compile_s = max_compile_s
        self._read_config = read_config
        self._vocab_size = vocab_size
        self._process: _Process | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def compile(self, params: GuidedDecodingParams) -> Compiled:
        """Raises InvalidRequest for a guide that is wrong or too large, Unavailable if the process is not there."""
        from xgrammar import CompiledGrammar

        process, text = self._compiled(params)
        return Compiled(CompiledGrammar.deserialize_json(text, process.vocabulary.info_for(params)), process.vocabulary)

    def check(self, params: GuidedDecodingParams) -> None:
        """Compile a guide for an engine that compiles it again. Raises what `compile` raises."""
        self._compiled(params)

    def _compiled(self, params: GuidedDecodingParams) -> tuple[_Process, str]:
        """The process that has compiled a guide, and what it made."""
        process = self._ready()
        asked_s = time.monotonic()
        try:
            answer = process.ask(msgspec.msgpack.encode(params), HANGS_AFTER * self.max_compile_s)
            is_there = bool(answer) or process.ask(PROBE, self.max_compile_s / 2) == COMPILED
        except TimeoutError as error:  # a fork would have been ended
            process.end()
            raise Unavailable("the process that compiles guides hung; the next guide starts it again") from error
        if answer[:1] == COMPILED:
            return process, answer[1:].decode()
        if answer[:1] == REFUSED:
            raise _refusal(PLACE.sub("", answer[1:].decode()))
        if not is_there:
            raise Unavailable("the process that compiles guides has ended; the next guide starts it again")
        if time.monotonic() - asked_s >= self.max_compile_s:
            raise TooSlow(f"{RULE}: to compile it takes more than {self.max_compile_s:g} s here", FIELD)
        raise _refusal(
            f"to compile it takes more than {MAX_COMPILE_S} s, or {MAX_COMPILE_BYTES >> 20} MiB, "
            f"or it is larger than {MAX_COMPILED_BYTES >> 20} MiB then"
        )

    def close(self) -> None:
        """End the process, with all that it compiles."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()

    def _ready(self) -> _Process:
        """The process, which has started. Raises Unavailable if it has not in time, or if it has ended."""
        max_wait_s = 2 * self.max_compile_s
        deadline_s = time.monotonic() + max_wait_s
        still_starts = f"the process that compiles guides still starts after {max_wait_s:g} s; try again"
        if not self._lock.acquire(timeout=max_wait_s):
            raise Unavailable(still_starts)
        try:
            if self._process is not None and not self._process.is_alive():
                self._process.close()
                self._process = None
            process = self._process = self._process or self._start()
        finally:
            self._lock.release()
        if self._is_closed:
            process.close()
        try:
            process.is_ready = process.is_ready or process.ask(PROBE, deadline_s - time.monotonic()) == COMPILED
        except TimeoutError as error:
            if time.monotonic() - process.started_s > MAX_START_S:
                process.end()
            raise Unavailable(still_starts) from error
        if not process.is_ready:
            raise Unavailable("the process that compiles guides did not start; its reason is in the log")
        return process

    def _start(self) -> _Process:
        config = self._read_config()
        start = msgspec.msgpack.encode(Start(config, self._vocab_size, self.max_compile_s))
        ours, its = socket.socketpair()
        with its, os.fdopen(os.memfd_create("guides"), "wb+") as file:
            file.write(start)
            file.seek(0)
            fds = [its.fileno(), file.fileno()]
            argv = [sys.executable, "-m", "handlers.base.guide_process", *map(str, fds)]
            try:
                popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds)
            except OSError:
                ours.close()
                raise
        log.info("guided decoding: process %d compiles guides", popen.pid)
        return _Process(popen, ours, Vocabulary(config, self._vocab_size), time.monotonic())


def may_change(error: BaseException | None) -> bool:
    """Whether a second attempt to compile a guide may end otherwise."""
    return isinstance(error, TooSlow) or not isinstance(error, InvalidRequest | None)


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{RULE}: {cause_line(Exception(reason))}", FIELD)
