"""Sends a prompt to the engine that has computed its beginning, whose keys and values it may still
cache.

The front ends of a server share what they know: a client reaches any of them, whatever its prompt
is.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec

from lmi.engine.client import ANYBODY, BySlot, EngineConnection, Engines, slot_of
from lmi.engine.submission import FrameMemory, Submission
from lmi.executor import Request
from lmi.shared.records import WORD
from lmi.shared.state import EngineRecord, FrontEndRecord
from lmi.types import Origin

BLOCK_SIZE = 64  # tokens
# The blocks of a prompt that are looked at; those behind them are not.
MAX_PROMPT_BLOCKS = 256
# Four for each block of 2 million tokens of prompts.
NUM_WORDS = 1 << 17
# The bits of a key that choose its word.
PLACE_MASK = NUM_WORDS - 1
# How many bits of a word stand for engines.
NUM_BITS = 32
# The mask of these bits; the other bits of a word are those of the key.
ENGINES = (1 << NUM_BITS) - 1

log = logging.getLogger(__name__)


class PrefixTable:
    """Which engines have had which blocks of prompts: hints, which may be lost or old.

    A word is chosen by the key of a block. It has the upper half of the key, and a bit for each
    engine. Processes read and write whole words without a lock. A block whose word another one
    takes is forgotten; the next prompt that has it writes it again.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """`memory` is shared with other front ends; None: this one is alone."""
        self._bytes = memoryview(mmap.mmap(-1, NUM_WORDS * WORD) if memory is None else memory)
        self._words = self._bytes.cast("q")

    @classmethod
    def shared(cls, path: Path) -> Self:
        """Return the table in a file, which the first front end makes. Without room on the disk it
        is not shared.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # At once, because a later write to a full disk would kill the writer.
                os.posix_fallocate(fd, 0, NUM_WORDS * WORD)
                return cls(mmap.mmap(fd, NUM_WORDS * WORD))
            finally:
                os.close(fd)
        except OSError as error:
            log.warning(
                "front ends do not share what they know of cached prompts: %s: %s",
                path,
                error.strerror,
            )

            return cls()

    def note(self, keys: Sequence[int], slot: int) -> None:
        """Note that an engine gets a prompt with these blocks."""
        words = self._words
        bit = 1 << slot % NUM_BITS

        for key in keys:
            place = key & PLACE_MASK
            word = words[place]
            if not _is_of(word, key):
                words[place] = key & ~ENGINES | bit
            elif not word & bit:
                words[place] = word | bit

    def num_known_blocks(self, keys: Sequence[int], num_slots: int) -> list[int]:
        """Return how many blocks at the beginning of a prompt the engine in each slot has had.

        The key of a block says all blocks before it, so the last one that an engine has had says
        that it had those.
        """
        words = self._words
        num_known = [0] * num_slots
        every_engine = (1 << min(num_slots, NUM_BITS)) - 1
        engines = 0

        for num_blocks, key in zip(range(len(keys), 0, -1), reversed(keys), strict=True):
            word = words[key & PLACE_MASK]
            if not _is_of(word, key):
                continue

            new = word & every_engine & ~engines
            if not new:
                continue

            for slot in range(num_slots):
                if new >> slot % NUM_BITS & 1:
                    num_known[slot] = num_blocks

            engines |= new
            if engines == every_engine:
                break

        return num_known

    def forget(self, slot: int) -> None:
        """Note that an engine was lost, with all that it had cached.

        The whole table is read, changed as one number and written: what others write meanwhile may
        be lost.
        """
        bit = 1 << slot % NUM_BITS
        all_bits = (1 << 8 * WORD) - 1
        mask_of_word = (all_bits & ~bit).to_bytes(WORD, "little")
        mask = int.from_bytes(mask_of_word * NUM_WORDS, "little")
        words = int.from_bytes(self._bytes, "little") & mask
        self._bytes[:] = words.to_bytes(NUM_WORDS * WORD, "little")


def _is_of(word: int, key: int) -> bool:
    """Whether a word is of the block with this key: their upper halves are the same, so that an
    exclusive or leaves only bits of the lower half, and no sign.
    """
    return 0 <= word ^ key <= ENGINES


class PrefixEngines(Engines):
    """Engines of which one counts as having less to do by the tokens of the prompt that it has had.

    The engine of a `prompt_cache_key` counts as having had the whole prompt: it may have had
    similar prompts before.
    """

    def __init__(
        self,
        sockets: Sequence[str],
        records: Sequence[EngineRecord],
        record: FrontEndRecord | None = None,
        table: PrefixTable | None = None,
        memory: FrameMemory | None = None,
    ) -> None:
        """`table` is that of all front ends; None: this one is alone."""
        super().__init__(sockets, records, record, memory)
        self._table = table or PrefixTable()

    def encoded(self, request: Request, origin: Origin = ANYBODY) -> Submission:
        submission = super().encoded(request, origin)
        submission.prefix_keys = keys_of(request)
        return submission

    def _best(
        self, engines: BySlot, submission: Submission, prompt_cache_key: str | None = None
    ) -> EngineConnection:
        keys = submission.prefix_keys
        num_known = self.num_known(keys)
        if prompt_cache_key is not None:
            num_known[slot_of(prompt_cache_key, engines)] = submission.num_prompt_tokens

        def load(slot: int) -> int:
            return engines[slot].num_outstanding_tokens - num_known[slot]

        slot = min(engines, key=load)
        self._table.note(keys, slot)
        return engines[slot]

    def num_known(self, keys: Sequence[int]) -> list[int]:
        """Return how many tokens at the beginning of a prompt the engine in each slot has had."""
        num_blocks = self._table.num_known_blocks(keys, len(self.records))
        return [BLOCK_SIZE * num for num in num_blocks]

    async def _connect(self, slot: int) -> None:
        await super()._connect(slot)
        # A new connection: the engine was lost. Where this front end ends, the task is cancelled
        # above.
        self._table.forget(slot)


def keys_of(request: Request) -> list[int]:
    """Return the hash of each whole block of a prompt with all before it, the adapter, the
    `cache_salt` and images.

    It is the same in every process: Python hashes numbers alike everywhere.
    """
    token_ids = request.input_token_ids
    num_blocks = min(len(token_ids) // BLOCK_SIZE, MAX_PROMPT_BLOCKS)
    keys = [_root_of(request)]
    for start in range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE):
        block = tuple(token_ids[start : start + BLOCK_SIZE])
        keys.append(hash((keys[-1], block)))

    return keys[1:]


def _root_of(request: Request) -> int:
    """Return a number for what keeps requests with the same tokens apart."""
    adapter = None
    if request.lora_config is not None:
        adapter = request.lora_config.name

    is_plain = adapter is None and request.cache_salt is None
    if is_plain and not request.images:
        return 0

    owner = msgspec.msgpack.encode((adapter, request.cache_salt, request.images))
    digest = blake2b(owner, digest_size=WORD).digest()
    return int.from_bytes(digest, "big")
