"""The engine's end of the process that compiles guides."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
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
from lmi.errors import GenerationFailed, InvalidRequest, cause_line
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

FIELD = "guided_decoding_params"
MAX_WAIT_S = 60.0  # for one answer, on a machine that gives the process little time
PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # a line of the compiler's code: [04:07:14] /x/regex.cc:83:

log = logging.getLogger(__name__)


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
    max_wait_s: float

    def ask(self, message: bytes) -> bytes:
        """Send a message over a new connection. Returns the answer, b"" if there is none.

        Raises GenerationFailed if the answer takes too long, and ends the process: it hangs.
        """
        ours, its = socket.socketpair()
        with ours, its:
            ours.settimeout(self.max_wait_s)
            try:
                socket.send_fds(self.control, [b"."], [its.fileno()])
                its.close()
                ours.sendall(message)
                ours.shutdown(socket.SHUT_WR)
                return read_all(ours)
            except TimeoutError as error:
                self.end()
                raise GenerationFailed(f"to compile the guide took more than {self.max_wait_s:g} s") from error
            except OSError:  # the process has ended
                return b""

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def answers(self) -> bool:
        """Whether the process is still there: one that is being ended may have no exit status yet."""
        return self.ask(PROBE) == COMPILED

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        self.control.close()
        self.end()


class GuideCompiler:
    """Compiles guides. The process starts with the first one. Safe to use from several threads."""

    def __init__(
        self, read_config: Callable[[], GuidedDecodingConfig], vocab_size: int, max_wait_s: float = MAX_WAIT_S
    ) -> None:
        """`read_config` gives the vocabulary; it is called with the first guide. `vocab_size` is that of the logits.

        `max_wait_s` bounds the start of the process, and later each answer.
        """
        self.max_wait_s = max_wait_s
        self._read_config = read_config
        self._vocab_size = vocab_size
        self._process: _Process | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def compile(self, params: GuidedDecodingParams) -> Compiled:
        """Raises InvalidRequest for a guide that is wrong or too large, GenerationFailed if the process has ended."""
        from xgrammar import CompiledGrammar

        process, text = self._compiled(params)
        return Compiled(CompiledGrammar.deserialize_json(text, process.vocabulary.info_for(params)), process.vocabulary)

    def check(self, params: GuidedDecodingParams) -> None:
        """Compile a guide for an engine that compiles it again. Raises what `compile` raises."""
        self._compiled(params)

    def _compiled(self, params: GuidedDecodingParams) -> tuple[_Process, str]:
        """The process that has compiled a guide, and what it made."""
        process = self._started()
        answer = process.ask(msgspec.msgpack.encode(params))
        if answer[:1] == COMPILED:
            return process, answer[1:].decode()
        if answer[:1] == REFUSED:
            raise _refusal(PLACE.sub("", answer[1:].decode()))
        if not process.answers():
            raise GenerationFailed("the process that compiles guides has ended")
        raise _refusal(
            f"to compile it takes more than {MAX_COMPILE_S} s, or {MAX_COMPILE_BYTES >> 20} MiB, "
            f"or it is larger than {MAX_COMPILED_BYTES >> 20} MiB then"
        )

    def close(self) -> None:
        """End the process, with all that it compiles."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()

    def _started(self) -> _Process:
        with self._lock:
            if self._process is not None and not self._process.is_alive():
                self._process.close()
                self._process = None
            if self._process is None:
                self._process = self._start()
            return self._process

    def _start(self) -> _Process:
        config = self._read_config()
        ours, its = socket.socketpair()
        with its:
            argv = [sys.executable, "-m", "handlers.base.guide_process", str(its.fileno())]
            try:
                popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
            except OSError:
                ours.close()
                raise
        process = self._process = _Process(popen, ours, Vocabulary(config, self._vocab_size), self.max_wait_s)
        try:
            answer = b"" if self._is_closed else process.ask(msgspec.msgpack.encode(Start(config, self._vocab_size)))
        except GenerationFailed:  # else the next guide would be asked of a process that knows no vocabulary
            process.close()
            raise
        if answer != COMPILED:
            process.close()
            raise GenerationFailed("the process that compiles guides did not start; its reason is in the log")
        log.info("guided decoding: process %d compiles guides", popen.pid)
        return process


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"must be a structure that xgrammar can follow: {cause_line(Exception(reason))}", FIELD)
