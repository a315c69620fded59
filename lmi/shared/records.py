"""Records in memory that several processes share: a class declares its fields, each of one type of
value, and an attribute of the record reads or sets the value in the memory.

Values are 8 bytes, aligned, so a reader sees an old value or a new one. A field has one writer at a
time, as a rule the process that the record is about. Totals survive its death: the next process of
the slot goes on counting. Gauges are zero when a process claims its slot, and again when its record
is released after its end.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

WORD = 8  # bytes


class SharedWords:
    """Mapped memory, as bytes and as words that are whole numbers or floating-point numbers."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.raw = memoryview(memory)
        self.ints = self.raw.cast("q")
        self.floats = self.raw.cast("d")


class Field:
    """A named place in a record, `num_words` long. Each subclass is one type of value, which is
    read and set as an attribute of the record.
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
    """UTF-8 text, cut where its place ends. It is for people, because a reader may see it half
    written.
    """

    def __init__(self, num_bytes: int, *, is_gauge: bool = False) -> None:
        super().__init__(is_gauge=is_gauge)
        self.num_words = num_bytes // WORD

    def __get__(self, record: Record, owner: type) -> str:
        text, _, _ = bytes(self.bytes_in(record)).partition(b"\0")
        return text.decode("utf-8", "ignore")

    def __set__(self, record: Record, value: str) -> None:
        place = self.bytes_in(record)
        # A path in it may have bytes that are no UTF-8.
        text = value.encode(errors="replace")[: len(place) - 1]
        place[:] = text.ljust(len(place), b"\0")


class Counters(Field):
    """A number for each label of a fixed list. Labels that are not on it count as the last one."""

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
        """Add to the counter of a label, or to the last one for a label that is not known."""
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
    """Counts of observed values, and their sum. A value counts at the first bound that it does not
    exceed, or in a last count if it exceeds all.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self.bounds = tuple(map(float, bounds))
        self.num_words = len(self.bounds) + 2

    def __get__(self, record: Record, owner: type) -> HistogramView:
        return HistogramView(self, record)


class HistogramView:
    """A histogram of one record. To make the view costs more than to observe a value, so keep it
    for frequent use.
    """

    def __init__(self, histogram: Histogram, record: Record) -> None:
        self.bounds = histogram.bounds
        self._ints = record.block.ints
        self._floats = record.block.floats
        self._start = record.base + histogram.offset
        # The index of the sum, behind all counts.
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
    """The fields about one process. Subclasses declare them, in the order in which they lie in
    memory.
    """

    pid: Int | int
    fields: dict[str, Field] = {}
    num_words = 0

    def __init_subclass__(cls) -> None:
        cls.fields = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        cls.num_words = 0
        for field in cls.fields.values():
            field.offset = cls.num_words
            cls.num_words += field.num_words

    def __init__(self, block: SharedWords, base: int) -> None:
        """Find the record in a block, from its word `base` on."""
        self.block = block
        self.base = base

    def claim(self) -> None:
        """Take the slot for this process. Clears the gauges and keeps the totals."""
        self.release()
        self.pid = os.getpid()

    def release(self) -> None:
        """Free the slot of a process that has ended. Clears the gauges and keeps the totals."""
        for field in self.fields.values():
            if field.is_gauge:
                field.bytes_in(self)[:] = bytes(field.num_words * WORD)
