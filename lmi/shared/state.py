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
from itertools import accumulate, chain
from pathlib import Path

from lmi.errors import STATUSES, LmiError, NoMemory, is_out_of_memory

WORD = 8  # bytes
SILENT_S = 5.0  # an engine without a sign of life for so long does not count as ready


class Field:
    """A named place in a record, `num_words` long. Its type says what a record gives and takes
    under the name.
    """

    num_words = 1

    def __init__(self, *, is_gauge: bool = False) -> None:
        self.is_gauge = is_gauge
        self.offset = 0  # words from the start of the record

    def bytes_in(self, record: Record) -> memoryview:
        start = (record.base + self.offset) * WORD
        return record.block.raw[start : start + self.num_words * WORD]


class Int(Field):
    def __get__(self, record: Record, owner: type) -> int:
        return record.block.ints[record.base + self.offset]

    def __set__(self, record: Record, value: int) -> None:
        record.block.ints[record.base + self.offset] = value


class Float(Field):
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
        return bytes(self.bytes_in(record)).split(b"\0", 1)[0].decode("utf-8", "ignore")

    def __set__(self, record: Record, value: str) -> None:
        place = self.bytes_in(record)
        place[:] = value.encode()[: len(place) - 1].ljust(len(place), b"\0")


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
    def __init__(self, counters: Counters, record: Record) -> None:
        self._index = counters.index
        self._ints = record.block.ints
        self._start = record.base + counters.offset

    def add(self, label: str, amount: int = 1) -> None:
        self._ints[self._start + self._index.get(label, len(self._index) - 1)] += amount

    def set(self, values: Mapping[str, int]) -> None:
        """Show these values, and 0 for each other label."""
        for label, i in self._index.items():
            self._ints[self._start + i] = values.get(label, 0)

    def items(self) -> Iterator[tuple[str, int]]:
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
        self._ints[self._start + bisect_left(self.bounds, value)] += count
        self._floats[self._sum_at] += value * count

    @property
    def counts(self) -> list[int]:
        """The count of each bound, not cumulative, and then the count above all bounds."""
        return self._ints[self._start : self._sum_at].tolist()

    @property
    def sum(self) -> float:
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
# (`server/metrics.py`).
PHASE_BOUNDS_S = (
    *(0.001, 0.003, 0.01, 0.03, 0.1),
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005),
    *(
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
    ),
)
STEP_BOUNDS = (1, *(2**power for power in range(3, 15)))  # tokens
LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # tokens


class Phase(enum.IntEnum):
    STARTING = 0
    LOADING = 1
    READY = 2
    DRAINING = 3
    LOST = 4  # died or hung; a restart is on its way
    FAILED = 5  # final, but for one of several engines, which is tried again
    # a server that was told to stop and serves on, while those who ask `/ping` choose another
    LEAVING = 6


class SupervisorRecord(Record):
    pid = Int(is_gauge=True)
    phase = Int()
    reason = TextField(2048)  # why it failed or drains, one line for people
    stage = TextField(64)  # of the start, before there are engines: download, requirements
    progress = Float()  # of the stage, 0 to 1
    credentials_version = Int()  # how often keys and certificates were read again
    log_level = (
        Int()
    )  # that SIGUSR1 chose, for the processes that have a record; 0: that of the settings
    heir = Int()  # the pid of the server that has taken the ports of this one over
    num_engine_restarts = Int()
    num_log_lines_dropped = Int()
    num_log_lines_dropped_by_master = Int()  # gunicorn's, which writes this field and has no record


MAX_LORA_NAMES_BYTES = 2048
PRIORITIES = ("high", "low", "default")  # over, under and at that of a request that names none


class EngineRecord(Record):
    """One slot of an engine or of user code.

    The supervisor writes `num_starts` and `lost_s`, `phase` of a worker that it starts, and
    `phase`, `reason` and `cause` of one that died or hangs.
    """

    pid = Int(is_gauge=True)
    phase = Int()
    num_starts = Int()
    was_ready = Int()  # 1 once a process of this slot was ready
    stage = TextField(64, is_gauge=True)  # config, weights, warm-up ...
    progress = Float(is_gauge=True)  # of the stage, 0 to 1
    reason = TextField(2048)  # of the last death, one line
    cause = TextField(32)  # the label of that error
    lost_s = Float()  # time.monotonic() of the last death
    beat_s = Float(is_gauge=True)  # time.monotonic() of the last sign of life
    step_s = Float(
        is_gauge=True
    )  # time.monotonic() of the last step, or when work came to an idle engine
    num_running = Int(is_gauge=True)  # requests in the batch
    num_waiting = Int(is_gauge=True)  # requests that wait for a place in it
    num_queued = Counters(PRIORITIES, is_gauge=True)  # requests in front of the engine
    num_taken = Counters(PRIORITIES, is_gauge=True)  # requests that the engine has
    num_clients = Int(is_gauge=True)  # of whom a request waits or runs
    num_refused = Counters(PRIORITIES)  # requests that would have waited, or have waited, too long
    wait_error_s = Float(is_gauge=True)  # how far expected waits were off, on average
    max_loras = Int(is_gauge=True)  # adapters that a batch may have; 0: the engine has none
    running_loras = TextField(
        MAX_LORA_NAMES_BYTES, is_gauge=True
    )  # names of those in the batch, with commas between
    waiting_loras = TextField(
        MAX_LORA_NAMES_BYTES, is_gauge=True
    )  # of those for which a request waits
    num_used_blocks = Int(is_gauge=True)
    max_num_blocks = Int(is_gauge=True)
    tokens_per_block = Int(is_gauge=True)
    max_num_sequences = Int(is_gauge=True)
    num_context_tokens = Int()  # that prefills have computed
    num_generation_tokens = Int()  # of decodes
    num_preemptions = Int()  # sequences put back to make room
    queue_time_s = Histogram(PHASE_BOUNDS_S)  # from the arrival at the engine to the first step
    prefill_time_s = Histogram(PHASE_BOUNDS_S)  # from there to the sequence's first token
    decode_time_s = Histogram(PHASE_BOUNDS_S)  # from there to its last
    num_drafts = Int()
    num_draft_tokens = Int()
    num_accepted_tokens = Int()  # of drafts
    step_length = Histogram(STEP_BOUNDS)
    step = Int(is_gauge=True)  # the number of the last one
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
}  # HTTP's, and those of one API
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
    num_requests = Counters(STATUS_CODES)  # that have ended, without pings and scrapes
    num_in_flight = Int(is_gauge=True)  # between admission and end
    num_sequences = Int(is_gauge=True)  # that those requests ask for
    num_body_bytes = Int(is_gauge=True)  # held of request bodies, whole or in part
    num_open_connections = Int(is_gauge=True)
    loop_lag_s = Float(is_gauge=True)  # the worst of the event loop, lately
    num_lost_traces = Int()
    request_duration_s = Histogram(LATENCY_BOUNDS_S)  # from the request's arrival to its end
    num_finished = Counters(FINISH_REASONS)  # generations
    num_moved = Int()  # requests that went on at another replica
    num_prompt_tokens = Int()
    num_cached_tokens = Int()  # of prompts
    num_generated_tokens = Int()
    time_to_first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)  # from a request's arrival
    inter_token_latency_s = Histogram(
        INTER_TOKEN_BOUNDS_S
    )  # of each token, or of a whole answer on average
    time_per_output_token_s = Histogram(INTER_TOKEN_BOUNDS_S)  # of a whole answer on average
    answer_time_s = Histogram(PHASE_BOUNDS_S)  # from a request's arrival to the end of its answer
    prompt_length = Histogram(LENGTH_BOUNDS)
    prefill_length = Histogram(LENGTH_BOUNDS)  # of what was not cached of a prompt
    sequence_length = Histogram(LENGTH_BOUNDS)
    longest_sequence = Histogram(LENGTH_BOUNDS)  # of an answer


class Block:
    """The mapped file: three numbers of records, the supervisor's, then those of engines, front
    ends and formatters.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.raw = memoryview(memory)
        self.ints, self.floats = self.raw.cast("q"), self.raw.cast("d")

        num_engines, num_frontends, num_formatters = self.ints[:3]
        bases = accumulate(_num_words(num_engines, num_frontends, num_formatters))

        self.supervisor = SupervisorRecord(self, next(bases))
        self.engines = [EngineRecord(self, next(bases)) for _ in range(num_engines)]
        self.frontends = [FrontEndRecord(self, next(bases)) for _ in range(num_frontends)]
        self.formatters = [EngineRecord(self, next(bases)) for _ in range(num_formatters)]

    @classmethod
    def create(
        cls, path: Path, num_engines: int, num_frontends: int, num_formatters: int = 0
    ) -> Block:
        """Make the file, all zero, which only this user can read. Raises OSError if the disk is
        full.

        The file takes its room on the disk now. A later write to a mapped page on a full disk would
        kill the writer.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(
                fd, 0, WORD * sum(_num_words(num_engines, num_frontends, num_formatters))
            )
            os.pwrite(fd, struct.pack("qqq", num_engines, num_frontends, num_formatters), 0)
        finally:
            os.close(fd)

        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> Block:
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))


def _num_words(num_engines: int, num_frontends: int, num_formatters: int) -> list[int]:
    """Return the length of a block's three numbers and of each record, in their order."""
    kinds = (
        [EngineRecord] * num_engines,
        [FrontEndRecord] * num_frontends,
        [EngineRecord] * num_formatters,
    )
    return [3, *(kind.num_words for kind in (SupervisorRecord, *chain.from_iterable(kinds)))]
