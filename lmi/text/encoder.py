"""Encode texts with a tokenizer that is not trusted. `confined.py` runs this program, and says what
goes to and fro.

The kernel ends this process where a text takes more time or memory than it may: no code of the
tokenizer's library could be asked to stop. It also ends with the process that started it, whose
pipe then has an end.
"""

import os
import resource
import signal
import struct
import sys
from array import array
from pathlib import Path
from typing import BinaryIO

import tokenizers

# Flags, the seconds of CPU that the text may take, the bytes of the text.
REQUEST = struct.Struct("!BdI")
# A status, and the bytes that follow.
ANSWER = struct.Struct("!BI")
# The flags of a request.
ADDS_SPECIAL_TOKENS = 1
SPELLS_SPECIAL_TOKENS = 2
HAS_OFFSETS = 4
# The statuses of an answer.
DONE = 0
FAILED = 1
# Texts may take so many bytes beside those of the tokenizer.
MAX_MEMORY = 1 << 30
MAX_TOKENS_PER_BYTE = 32
MAX_ADDED_TOKENS = 1024


def main() -> None:
    """Encode the texts that come on standard input, until it ends."""
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer

    (length,) = struct.unpack("!I", _read(requests, 4))
    backend = tokenizers.Tokenizer.from_buffer(_read(requests, length))

    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_memory = num_pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _write(answers, DONE, b"")

    while head := requests.read(REQUEST.size):
        flags, max_cpu_s, length = REQUEST.unpack(head)
        text = _read(requests, length).decode()
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        try:
            status = DONE
            data = _encode(backend, text, flags)
        except BaseException as error:
            # A panic of the library is no Exception.
            status = FAILED
            data = f"{error}".encode(errors="replace")[:1000]

        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answers, status, data)


def _encode(backend: tokenizers.Tokenizer, text: str, flags: int) -> bytes:
    """Return the ids of a text, and behind them where each begins and where it ends, if that is
    wanted.
    """
    backend.encode_special_tokens = bool(flags & SPELLS_SPECIAL_TOKENS)
    adds_special_tokens = bool(flags & ADDS_SPECIAL_TOKENS)
    encoding = backend.encode(text, add_special_tokens=adds_special_tokens)

    ids = array("I", encoding.ids)
    if len(ids) > MAX_ADDED_TOKENS + MAX_TOKENS_PER_BYTE * len(text.encode()):
        raise ValueError(f"{len(ids)} tokens for a text of {len(text)} characters")

    if flags & HAS_OFFSETS:
        ids.extend(start for start, _ in encoding.offsets)
        ids.extend(end for _, end in encoding.offsets)

    return ids.tobytes()


def _read(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        sys.exit()

    return data


def _write(file: BinaryIO, status: int, data: bytes) -> None:
    file.write(ANSWER.pack(status, len(data)))
    file.write(data)
    file.flush()


if __name__ == "__main__":
    main()
