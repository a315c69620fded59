"""The process that compiles guides, apart from the engine, because a compilation cannot be stopped otherwise.

It has read the vocabulary once and forks for each guide. A fork has limits on its processor time, its time and its
memory, and the kernel ends the fork that reaches one. So a guide that explodes harms nobody. Each guide has a
connection of its own: the text goes in up to the end of the stream, and the answer comes out. No answer means that the
fork was ended.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from handlers.base.guide_vocabulary import Vocabulary
from handlers.base.schema_keywords import check_keywords
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType
from lmi.shared import linux

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

MAX_COMPILE_S = 3  # of processor time
MAX_COMPILE_BYTES = 1 << 30  # of memory, more than the process has
MAX_COMPILED_BYTES = 64 << 20  # of the answer
COMPILED, REFUSED = b"+", b"-"
PROBE = b""  # asks for nothing; its answer is COMPILED
ANY_OBJECT = '{"type": "object"}'
MAX_SPACES = 16  # between two values of JSON: a model that goes on writing spaces would never end
NICENESS = 5  # the engine's step goes first
PAGE_BYTES = resource.getpagesize()


class Start(msgspec.Struct):
    """What the process reads first. `vocab_size` is the width of the logits, `max_compile_s` the time of a guide."""

    config: GuidedDecodingConfig
    vocab_size: int
    max_compile_s: float


def compile_guide(vocabulary: Vocabulary, params: GuidedDecodingParams) -> CompiledGrammar:
    """Raises RuntimeError or ValueError if it cannot be compiled."""
    from xgrammar import Grammar, GrammarCompiler

    compiler = GrammarCompiler(vocabulary.info_for(params), max_threads=1, cache_enabled=False)
    guide = params.guide or ""
    if params.guide_type is GuideType.JSON:
        return compiler.compile_json_schema(ANY_OBJECT, max_whitespace_cnt=MAX_SPACES)
    if params.guide_type is GuideType.JSON_SCHEMA:
        for pattern in check_keywords(guide):
            Grammar.from_regex(pattern)  # in a schema, what is wrong in it would count as letters
        return compiler.compile_json_schema(guide, max_whitespace_cnt=MAX_SPACES)
    if params.guide_type is GuideType.REGEX:
        return compiler.compile_regex(guide)
    return compiler.compile_grammar(guide)


def read_all(connection: socket.socket) -> bytes:
    """Read up to the end of the stream."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _answer(vocabulary: Vocabulary, connection: socket.socket, max_compile_s: float) -> None:
    """Compile the guide of a connection within the limits."""
    _limit(max_compile_s)
    if (message := read_all(connection)) == PROBE:
        connection.sendall(COMPILED)
        return
    params = msgspec.msgpack.decode(message, type=GuidedDecodingParams)
    try:
        compiled = compile_guide(vocabulary, params)
        _try_mask(compiled)
        answer = COMPILED + compiled.serialize_json().encode()
    except (RuntimeError, ValueError) as error:
        is_memory = "bad_alloc" in str(error)
        answer = b"" if is_memory else REFUSED + str(error).encode("utf-8", "backslashreplace")
    if len(answer) <= MAX_COMPILED_BYTES:
        connection.sendall(answer)


def _try_mask(compiled: CompiledGrammar) -> None:
    """Compute the first mask, because it may explode too. Raises ValueError if it allows no token."""
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    mask = allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    matcher = GrammarMatcher(compiled)
    matcher.fill_next_token_bitmask(mask)
    if not mask.any() and not matcher.is_completed():
        raise ValueError("no text of this vocabulary fits it")


def _limit(max_compile_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max_compile_s)  # its signal ends a process that does not handle it
    os.nice(NICENESS)
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MAX_COMPILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_COMPILE_S,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar warns of each client's guide


def _fork(vocabulary: Vocabulary, connection: socket.socket, max_compile_s: float) -> None:
    parent_pid = os.getpid()
    if os.fork():
        return
    try:
        linux.die_with_parent(parent_pid, signal.SIGKILL)
        _answer(vocabulary, connection, max_compile_s)
    finally:
        os._exit(0)


def _next(control: socket.socket) -> socket.socket | None:
    """The next connection, or None when the engine has closed its end."""
    _, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if fds else None


def main(control: socket.socket, start: BinaryIO) -> None:
    linux.set_title("lmi-guides")
    linux.set_oom_score(1000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the engine ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    with start:
        given = msgspec.msgpack.decode(start.read(), type=Start)
    vocabulary = Vocabulary(given.config, given.vocab_size)
    while (connection := _next(control)) is not None:
        with connection:
            _fork(vocabulary, connection, given.max_compile_s)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), open(int(sys.argv[2]), "rb"))
    os._exit(0)  # at once, with what it compiles
