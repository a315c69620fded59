"""What an engine and its process that compiles guides say to each other, and the limits of a compilation."""

from __future__ import annotations

import socket

import msgspec

from lmi.executor import GuidedDecodingConfig
from lmi.shared import linux

MAX_COMPILATIONS = 4  # at a time
MAX_COMPILE_S = 2  # of processor time
MAX_MEMORY_BYTES = 1 << 30  # of all compilations together, and at most an eighth of the container's
MAX_TEXT_BYTES = 16 << 20  # of the answer
COMPILED, REFUSED = b"+", b"-"
PROBE = b""  # asks for nothing; its answer is COMPILED
ANY_OBJECT = '{"type": "object"}'  # what JSON means


class Start(msgspec.Struct):
    """What the process reads first. `vocab_size` is the width of the logits, `max_compile_s` the time of a guide."""

    config: GuidedDecodingConfig
    vocab_size: int
    max_compile_s: float
    is_compact: bool


def max_compile_bytes() -> int:
    """The memory that one compilation may take."""
    return min(MAX_MEMORY_BYTES, linux.memory_bytes() // 8) // MAX_COMPILATIONS


def read_all(connection: socket.socket) -> bytes:
    """Read up to the end of the stream."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
