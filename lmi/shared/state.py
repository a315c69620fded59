"""The block of memory that all processes share. It has a record of each process (`records.py` says
how one lies in memory), so that any of them can be read without asking the process.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from lmi.errors import STATUSES, LmiError, NoMemory, is_out_of_memory
from lmi.shared.histogram_bounds import (
    FIRST_TOKEN_BOUNDS_S,
    INTER_TOKEN_BOUNDS_S,
    LATENCY_BOUNDS_S,
    LENGTH_BOUNDS,
    PHASE_BOUNDS_S,
    STEP_BOUNDS,
)
from lmi.shared.records import WORD, Counters, Float, Histogram, Int, Record, SharedWords, TextField

# An engine without a sign of life for so long does not count as ready.
SILENT_S = 5.0
MAX_LORA_NAMES_BYTES = 2048
# The classes of requests: their priority is over the default or under it, or they name none.
PRIORITIES = ("high", "low", "default")
# The statuses of responses that no error has: HTTP's, and those of single APIs.
OTHER_STATUSES = {
    101,
    200,
    207,
    405,
    408,
    415,
    417,
    422,
    426,
    429,
    431,
    501,
    505,
    529,
}
STATUS_CODES = (*map(str, sorted(STATUSES | OTHER_STATUSES)), "other")
FINISH_REASONS = ("length", "eos_token", "stop_sequence", "error", "cancelled", "other")


class Phase(enum.IntEnum):
    """How far a process is, or the server."""

    STARTING = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    # The process died or hung. It is started again soon.
    LOST = 4
    # The process is not started again. Only one of several engines is, seldom.
    FAILED = 5
    # The server was told to stop and serves on, while those who ask `/ping` choose another one.
    LEAVING = 6


class SupervisorRecord(Record):
    """What the supervisor tells all processes of the server."""

    pid = Int(is_gauge=True)
    phase = Int()
    # Why the server failed or drains, on one line for people.
    reason = TextField(2048)
    # The stage of the start, before there are engines: download, requirements.
    stage = TextField(64)
    # How much of the stage is done, 0 to 1.
    progress = Float()
    # How often keys and certificates were read again.
    credentials_version = Int()
    # The level that SIGUSR1 chose, for the processes that have a record; 0: that of the settings.
    log_level = Int()
    # The pid of the server that has taken the ports of this one over.
    heir = Int()
    num_engine_restarts = Int()
    num_log_lines_dropped = Int()
    # Gunicorn's master has no record of its own, and counts here.
    num_log_lines_dropped_by_master = Int()


class EngineRecord(Record):
    """One process of an engine or of user code.

    The supervisor writes `num_starts` and `lost_s`. It writes `phase` when it starts the process,
    and `phase`, `reason` and `cause` when the process has died or hangs.
    """

    block: Block

    pid = Int(is_gauge=True)
    phase = Int()
    num_starts = Int()
    # 1 once a process of this slot was ready.
    was_ready = Int()
    # The stage of the load: config, weights, warm-up and so on.
    stage = TextField(64, is_gauge=True)
    # How much of the stage is done, 0 to 1.
    progress = Float(is_gauge=True)
    # Why the last process died, on one line, and the label of that error.
    reason = TextField(2048)
    cause = TextField(32)
    # These three are by time.monotonic(): the last death, the last sign of life, and the last step,
    # or when work came to an idle engine.
    lost_s = Float()
    beat_s = Float(is_gauge=True)
    step_s = Float(is_gauge=True)
    # Requests in the batch.
    num_running = Int(is_gauge=True)
    # Requests that wait for a place in it.
    num_waiting = Int(is_gauge=True)
    # Requests in the queue in front of the engine, and those that the engine has.
    num_queued = Counters(PRIORITIES, is_gauge=True)
    num_taken = Counters(PRIORITIES, is_gauge=True)
    # Clients with a request that waits or runs.
    num_clients = Int(is_gauge=True)
    # Requests that were refused since they would have waited, or had waited, too long.
    num_refused = Counters(PRIORITIES)
    # How far expected waits were off, on average.
    wait_error_s = Float(is_gauge=True)
    # Adapters that a batch may have; 0: the engine has none.
    max_loras = Int(is_gauge=True)
    # The adapters in the batch, and those for which a request waits, with commas between the names.
    running_loras = TextField(MAX_LORA_NAMES_BYTES, is_gauge=True)
    waiting_loras = TextField(MAX_LORA_NAMES_BYTES, is_gauge=True)
    num_used_blocks = Int(is_gauge=True)
    max_num_blocks = Int(is_gauge=True)
    tokens_per_block = Int(is_gauge=True)
    # Bytes. 0 where the engine does not know.
    weights_bytes = Int(is_gauge=True)
    kv_cache_bytes = Int(is_gauge=True)
    # What of the cache was written, and not given back since.
    kv_cache_touched_bytes = Int(is_gauge=True)
    # What the process has in memory that it shares with no other.
    process_bytes = Int(is_gauge=True)
    max_num_sequences = Int(is_gauge=True)
    # Tokens that prefills have computed.
    num_context_tokens = Int()
    # Tokens that decodes have computed.
    num_generation_tokens = Int()
    # Sequences put back to make room.
    num_preemptions = Int()
    # From the arrival at the engine to the first step.
    queue_time_s = Histogram(PHASE_BOUNDS_S)
    # From the first step to the sequence's first token.
    prefill_time_s = Histogram(PHASE_BOUNDS_S)
    # From the first token to the last one.
    decode_time_s = Histogram(PHASE_BOUNDS_S)
    # Drafts, their tokens, and those of them that were right.
    num_drafts = Int()
    num_draft_tokens = Int()
    num_accepted_tokens = Int()
    # The tokens of a step.
    step_length = Histogram(STEP_BOUNDS)
    # The number of the last step.
    step = Int(is_gauge=True)
    num_log_lines_dropped = Int()

    def fail(self, error: BaseException, reason: str) -> None:
        """Note the error with which this process ends, for the supervisor, and for clients that
        wait for the model.
        """
        self.reason = reason
        if is_out_of_memory(error):
            self.cause = NoMemory.label
        elif isinstance(error, LmiError):
            self.cause = error.label
        else:
            self.cause = LmiError.label

    @property
    def is_alive(self) -> bool:
        """Whether the process is ready and gave a sign of life a moment ago."""
        return self.phase == Phase.READY and time.monotonic() - self.beat_s < SILENT_S


class FrontEndRecord(Record):
    """One front end. Its record in the server's block counts what belongs to no model, and that in
    a model's block what belongs to the model.
    """

    pid = Int(is_gauge=True)
    beat_s = Float(is_gauge=True)
    num_starts = Int()
    num_log_lines_dropped = Int()
    # Requests that have ended, without pings and scrapes.
    num_requests = Counters(STATUS_CODES)
    # Requests between admission and end.
    num_in_flight = Int(is_gauge=True)
    # The sequences that those requests ask for.
    num_sequences = Int(is_gauge=True)
    # The bytes of request bodies that are in memory, whole or in part.
    num_body_bytes = Int(is_gauge=True)
    num_open_connections = Int(is_gauge=True)
    # The longest that a turn of the event loop was late, lately.
    loop_lag_s = Float(is_gauge=True)
    num_lost_traces = Int()
    # From the request's arrival to its end.
    request_duration_s = Histogram(LATENCY_BOUNDS_S)
    # Generations by the reason of their end.
    num_finished = Counters(FINISH_REASONS)
    # Requests that went on at another replica.
    num_moved = Int()
    num_prompt_tokens = Int()
    # Tokens of prompts that were cached.
    num_cached_tokens = Int()
    num_generated_tokens = Int()
    # From a request's arrival.
    time_to_first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
    # Before each token, or in a whole answer on average.
    inter_token_latency_s = Histogram(INTER_TOKEN_BOUNDS_S)
    # In a whole answer on average.
    time_per_output_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
    # From a request's arrival to the end of its answer.
    answer_time_s = Histogram(PHASE_BOUNDS_S)
    prompt_length = Histogram(LENGTH_BOUNDS)
    # The tokens of a prompt that were not cached.
    prefill_length = Histogram(LENGTH_BOUNDS)
    sequence_length = Histogram(LENGTH_BOUNDS)
    # The longest sequence of an answer.
    longest_sequence = Histogram(LENGTH_BOUNDS)


R = TypeVar("R", bound=Record)


class Block(SharedWords):
    """The mapped file. It begins with the numbers of engines, front ends and formatters. Then come
    the records: the supervisor's, and those of these processes in the same order.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)

        num_engines, num_frontends, num_formatters = self.ints[:3]
        lengths = _num_words(num_engines, num_frontends, num_formatters)
        bases = accumulate(lengths)

        self.supervisor = SupervisorRecord(self, next(bases))
        self.engines = self._records(EngineRecord, num_engines, bases)
        self.frontends = self._records(FrontEndRecord, num_frontends, bases)
        self.formatters = self._records(EngineRecord, num_formatters, bases)

    def _records(self, kind: type[R], number: int, bases: Iterator[int]) -> list[R]:
        return [kind(self, next(bases)) for _ in range(number)]

    @classmethod
    def create(
        cls, path: Path, num_engines: int, num_frontends: int, num_formatters: int = 0
    ) -> Block:
        """Make the file, all zero, which only this user can read. Raises OSError if the disk is
        full.

        The file takes its room on the disk at once, because a later write to a mapped page on a
        full disk would kill the writer.
        """
        num_words = sum(_num_words(num_engines, num_frontends, num_formatters))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, WORD * num_words)
            os.pwrite(fd, struct.pack("qqq", num_engines, num_frontends, num_formatters), 0)
        finally:
            os.close(fd)

        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> Block:
        """Map the block that another process has made."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))


def _num_words(num_engines: int, num_frontends: int, num_formatters: int) -> list[int]:
    """Return the lengths of a block's parts in their order: its three numbers, then each record."""
    return [
        # The three numbers.
        3,
        SupervisorRecord.num_words,
        *[EngineRecord.num_words] * num_engines,
        *[FrontEndRecord.num_words] * num_frontends,
        *[EngineRecord.num_words] * num_formatters,
    ]
