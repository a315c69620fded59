"""The shared-memory block: it has a record of each process, and every process reads the records
without asking.

Values are 8 bytes, aligned, so a reader sees an old value or a new one. A field has one writer at a
time, as a rule the process itself. Totals survive its death, because the next process of the slot
continues to count. Gauges are zeroed when a process claims the slot, and when whoever reaps it
releases its record.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from lmi.errors import STATUSES, LmiError, NoMemory, is_out_of_memory

WORD = 8  # bytes
# An engine without a sign of life for so long does not count as ready.
SILENT_S = 5.0


class Field:
    """A named place in a record, `num_words` long. Its type says what a record gives and takes
    under the name.
    """

    num_words = 1

    def __init__(self, *, is_gauge: bool = False) -> None:
        self.is_gauge = is_gauge
        # Words from the start of the record.
        self.offset = 0

    def bytes_in(self, record: Record) -> memoryview:
        """Return the bytes of this field in a record."""
        start = (record.base + self.offset) * WORD
        return record.block.raw[start : start + self.num_words * WORD]


class Int(Field):
    """A whole number."""

    def __get__(self, record: Record, owner: type) -> int:
        return record.block.ints[record.base + self.offset]

    def __set__(self, record: Record, value: int) -> None:
        record.block.ints[record.base + self.offset] = value


class Float(Field):
    """A floating-point number."""

    def __get__(self, record: Record, owner: type) -> float:
        return record.block.floats[record.base + self.offset]

    def __set__(self, record: Record, value: float) -> None:
        record.block.floats[record.base + self.offset] = value


class TextField(Field):
    """UTF-8 text, cut to its place. It is for people, because a reader may see it half written."""

    def __init__(self, num_bytes: int, *, is_gauge: bool = False) -> None:
        super().__init__(is_gauge=is_gauge)
        self.num_words = num_bytes // WORD

    def __get__(self, record: Record, owner: type) -> str:
        text, _, _ = bytes(self.bytes_in(record)).partition(b"\0")
        return text.decode("utf-8", "ignore")

    def __set__(self, record: Record, value: str) -> None:
        place = self.bytes_in(record)
        text = value.encode()[: len(place) - 1]
        place[:] = text.ljust(len(place), b"\0")


class Counters(Field):
    """One total for each label of a fixed list. A label that is not on the list counts
    as the last.
    """

    def __init__(self, labels: Sequence[str], *, is_gauge: bool = False) -> None:
        super().__init__(is_gauge=is_gauge)
        self.index = {label: i for i, label in enumerate(labels)}
        self.num_words = len(labels)

    def __get__(self, record: Record, owner: type) -> CounterView:
        return CounterView(self, record)


class CounterView:
    """The counters of one record, by label."""

    def __init__(self, counters: Counters, record: Record) -> None:
        self._index = counters.index
        self._ints = record.block.ints
        self._start = record.base + counters.offset

    def add(self, label: str, amount: int = 1) -> None:
        """Add to the counter of a label; the last label stands for all that are unknown."""
        i = self._index.get(label, len(self._index) - 1)
        self._ints[self._start + i] += amount

    def set(self, values: Mapping[str, int]) -> None:
        """Show these values, and 0 for each other label."""
        for label, i in self._index.items():
            self._ints[self._start + i] = values.get(label, 0)

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each label and its count."""
        for label, i in self._index.items():
            yield label, self._ints[self._start + i]


class Histogram(Field):
    """Counts of observations by upper bound, then the count above all bounds, then the sum of the
    values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self.bounds = tuple(map(float, bounds))
        self.num_words = len(self.bounds) + 2

    def __get__(self, record: Record, owner: type) -> HistogramView:
        return HistogramView(self, record)


class HistogramView:
    """A histogram of one record. Keep the view for frequent use: making it costs more than an
    observation.
    """

    def __init__(self, histogram: Histogram, record: Record) -> None:
        self.bounds = histogram.bounds
        self._ints = record.block.ints
        self._floats = record.block.floats
        self._start = record.base + histogram.offset
        self._sum_at = self._start + len(self.bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or `count` equal ones."""
        self._ints[self._start + bisect_left(self.bounds, value)] += count
        self._floats[self._sum_at] += value * count

    @property
    def counts(self) -> list[int]:
        """The count of each bound, not cumulative, and then the count above all bounds."""
        return self._ints[self._start : self._sum_at].tolist()

    @property
    def sum(self) -> float:
        """The sum of the values."""
        return self._floats[self._sum_at]


class Record:
    """A row of fields about one process. Subclasses declare the fields, whose order is
    the layout.
    """

    pid: Int | int
    fields: dict[str, Field] = {}
    num_words = 0

    def __init_subclass__(cls) -> None:
        cls.fields = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        cls.num_words = 0
        for place in cls.fields.values():
            place.offset = cls.num_words
            cls.num_words += place.num_words

    def __init__(self, block: Block, base: int) -> None:
        self.block = block
        self.base = base

    def claim(self) -> None:
        """Take the slot for this process. Clears the gauges and keeps the totals."""
        self.release()
        self.pid = os.getpid()

    def release(self) -> None:
        """Free the slot of a process that has ended. Clears the gauges and keeps the totals."""
        for place in self.fields.values():
            if place.is_gauge:
                place.bytes_in(self)[:] = bytes(place.num_words * WORD)


LATENCY_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
# Those below are vLLM's, after a few smaller ones, so that its series can be made of ours
# (`server/twins.py`).
PHASE_BOUNDS_S = (
    0.001,
    0.003,
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
FIRST_TOKEN_BOUNDS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
INTER_TOKEN_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
# In tokens.
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# In tokens: 1, 2, 5, 10 and so on, to 500,000.
LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Phase(enum.IntEnum):
    """How far a process is, or the server."""

    STARTING = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    # It died or hung; a restart is on its way.
    LOST = 4
    # Final, but for one of several engines, which is tried again.
    FAILED = 5
    # A server that was told to stop and serves on, while those who ask `/ping` choose another.
    LEAVING = 6


class SupervisorRecord(Record):
    """What the supervisor tells all processes of the server."""

    pid = Int(is_gauge=True)
    phase = Int()
    # Why it failed or drains, one line for people.
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
    # Gunicorn's master writes this field and has no record.
    num_log_lines_dropped_by_master = Int()


MAX_LORA_NAMES_BYTES = 2048
# The class of a request is over or under the default priority, or it names none.
PRIORITIES = ("high", "low", "default")


class EngineRecord(Record):
    """One slot of an engine or of user code.

    The supervisor writes `num_starts` and `lost_s`, `phase` of a worker that it starts, and
    `phase`, `reason` and `cause` of one that died or hangs.
    """

    pid = Int(is_gauge=True)
    phase = Int()
    num_starts = Int()
    # 1 once a process of this slot was ready.
    was_ready = Int()
    # The stage of a load: config, weights, warm-up ...
    stage = TextField(64, is_gauge=True)
    # How much of the stage is done, 0 to 1.
    progress = Float(is_gauge=True)
    # Why the last process died, one line.
    reason = TextField(2048)
    # The label of that error.
    cause = TextField(32)
    # The time.monotonic() of the last death.
    lost_s = Float()
    # The time.monotonic() of the last sign of life.
    beat_s = Float(is_gauge=True)
    # The time.monotonic() of the last step, or when work came to an idle engine.
    step_s = Float(is_gauge=True)
    # Requests in the batch.
    num_running = Int(is_gauge=True)
    # Requests that wait for a place in it.
    num_waiting = Int(is_gauge=True)
    # Requests in front of the engine.
    num_queued = Counters(PRIORITIES, is_gauge=True)
    # Requests that the engine has.
    num_taken = Counters(PRIORITIES, is_gauge=True)
    # Clients of whom a request waits or runs.
    num_clients = Int(is_gauge=True)
    # Requests that would have waited, or have waited, too long.
    num_refused = Counters(PRIORITIES)
    # How far expected waits were off, on average.
    wait_error_s = Float(is_gauge=True)
    # Adapters that a batch may have; 0: the engine has none.
    max_loras = Int(is_gauge=True)
    # The names of those in the batch, with commas between.
    running_loras = TextField(MAX_LORA_NAMES_BYTES, is_gauge=True)
    # The names of those for which a request waits.
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
    # From there to the sequence's first token.
    prefill_time_s = Histogram(PHASE_BOUNDS_S)
    # From there to its last.
    decode_time_s = Histogram(PHASE_BOUNDS_S)
    num_drafts = Int()
    # Tokens of drafts.
    num_draft_tokens = Int()
    # Tokens of drafts that were right.
    num_accepted_tokens = Int()
    step_length = Histogram(STEP_BOUNDS)
    # The number of the last step.
    step = Int(is_gauge=True)
    num_log_lines_dropped = Int()

    def fail(self, error: BaseException, reason: str) -> None:
        """Note the error with which this process ends, for the supervisor and for those who wait
        for the model.
        """
        label = error.label if isinstance(error, LmiError) else LmiError.label
        self.reason = reason
        self.cause = NoMemory.label if is_out_of_memory(error) else label

    @property
    def is_alive(self) -> bool:
        """Whether the process is ready and gave a sign of life a moment ago."""
        return self.phase == Phase.READY and time.monotonic() - self.beat_s < SILENT_S


# Those of HTTP, and those of one API.
OTHER_STATUSES = {
    200,
    207,
    405,
    408,
    415,
    417,
    422,
    429,
    431,
    501,
    505,
    529,
}
STATUS_CODES = (*map(str, sorted(STATUSES | OTHER_STATUSES)), "other")
FINISH_REASONS = ("length", "eos_token", "stop_sequence", "error", "cancelled", "other")


class FrontEndRecord(Record):
    """One front end: in the server's block what belongs to no model, in a model's block what it
    counts of the model.
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
    # The worst lag of the event loop, lately.
    loop_lag_s = Float(is_gauge=True)
    num_lost_traces = Int()
    # From the request's arrival to its end.
    request_duration_s = Histogram(LATENCY_BOUNDS_S)
    # Generations by the reason of their end.
    num_finished = Counters(FINISH_REASONS)
    # Requests that went on at another replica.
    num_moved = Int()
    num_prompt_tokens = Int()
    # Tokens of prompts that a cache had.
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


class Block:
    """The mapped file: three numbers of records, the supervisor's, then those of engines, front
    ends and formatters.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.raw = memoryview(memory)
        self.ints = self.raw.cast("q")
        self.floats = self.raw.cast("d")

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

        The file takes its room on the disk now. A later write to a mapped page on a full disk would
        kill the writer.
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
    """Return the length of a block's three numbers and of each record, in their order."""
    return [
        # The three numbers.
        3,
        SupervisorRecord.num_words,
        *[EngineRecord.num_words] * num_engines,
        *[FrontEndRecord.num_words] * num_frontends,
        *[EngineRecord.num_words] * num_formatters,
    ]
