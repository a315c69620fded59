"""The log of every process of lmi. An event is a line of at most 16 KB: text on a terminal, else
JSON.

Line ends, escape sequences and invisible characters are escaped, so that no client can forge a line
or control the terminal. No process waits for the log's reader: a line without room is dropped, and
the next line that has room tells how many were.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson

from lmi.shared.sink import STDERR, Sink

# Clears the line of a terminal, where the progress bar of any process may stand.
CLEAR_LINE = b"\r\x1b[2K"
# Cyan, green, yellow, red.
COLOURS = {
    "DEBUG": 36,
    "INFO": 32,
    "WARNING": 33,
    "ERROR": 31,
    "CRITICAL": 31,
}
# The bytes of a line, with its end.
MAX_LINE = 16 << 10
# Control characters, line and paragraph separators, marks that change the direction of text, halves
# of surrogate pairs.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
# Loggers of libraries that write in other forms unless `setup` removes their handlers.
FOREIGN = (
    "gunicorn",
    "gunicorn.error",
    "gunicorn.access",
    "uvicorn",
    "uvicorn.error",
    "uvicorn.access",
)
# The attributes of an event that are not its caller's `extra`.
RECORD_FIELDS = frozenset(
    [*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"]
)


class _Tally(NamedTuple):
    """Where dropped lines are counted: a field of a record."""

    record: object
    field: str

    def add(self, num_lines: int) -> None:
        setattr(self.record, self.field, getattr(self.record, self.field) + num_lines)


_fd = STDERR
# Counts while the process has no record.
_unrecorded = SimpleNamespace(num_log_lines_dropped=0)
_tally = _Tally(_unrecorded, "num_log_lines_dropped")


def fd() -> int:
    """Return the descriptor that this process logs to. It is standard error, unless the supervisor
    reads that.
    """
    return _fd


def setup(role: str, level: str = "INFO", format: str = "auto", fd: int = STDERR) -> None:
    """Send every logger of this process to `fd` in one form. `role` names the process. A second
    call is harmless.
    """
    global _fd
    _fd = fd
    is_terminal = os.isatty(fd) and os.environ.get("TERM") not in ("dumb", "unknown")
    is_screen = is_text(format) and is_terminal
    has_colours = is_screen and not os.environ.get("NO_COLOR")
    render = partial(as_text, has_colours=has_colours) if is_text(format) else as_json
    line_start = CLEAR_LINE if is_screen else b""

    root = logging.getLogger()
    root.handlers[:] = [LineHandler(LineFormatter(role, render), fd, line_start)]
    root.setLevel(level)
    for name in FOREIGN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)

    logging.captureWarnings(True)


def follow(level: int) -> None:
    """Log from this level on, and say so if that is new.

    The level is that of the supervisor's record, which is 0 until a signal sets it.
    """
    root = logging.getLogger()
    if level and level != root.level:
        # The line about the change is written if either level allows it.
        root.setLevel(min(level, root.level))
        logging.getLogger(__name__).info("the log begins at %s now", logging.getLevelName(level))
        root.setLevel(level)


def is_text(format: str) -> bool:
    """Whether lines in this format are text for people."""
    return format == "text" or (format == "auto" and os.isatty(_fd))


def count_dropped_in(record: object, field: str = "num_log_lines_dropped") -> None:
    """Count the lines that this process drops in a field of its record in the shared block."""
    global _tally
    tally = _Tally(record, field)
    if _tally.record is _unrecorded:
        tally.add(_unrecorded.num_log_lines_dropped)

    _tally = tally


def add_dropped(num_lines: int) -> None:
    """Count lines of this process that were dropped."""
    _tally.add(num_lines)


def escape(text: str) -> str:
    """Return `text` with each character escaped that a line of a log must not contain."""
    if text.isascii() and text.isprintable():
        return text

    return UNSAFE.sub(_escaped, text)


class LineHandler(logging.Handler):
    """Writes each line in one call, so that lines of several processes do not mix. It does not wait
    for a reader.
    """

    def __init__(
        self, formatter: "LineFormatter", fd: int = STDERR, line_start: bytes = b""
    ) -> None:
        super().__init__()
        self.formatter: LineFormatter = formatter
        self.sink = Sink(fd)
        self._line_start = line_start
        # How many lines were dropped since the last one that was written.
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
            if self._num_dropped and self.sink.write(self._line(self._note())):
                self._num_dropped = 0

            if self._num_dropped or not self.sink.write(line):
                self._num_dropped += 1
                add_dropped(1)
        except Exception:
            self.handleError(record)

    def _note(self) -> logging.LogRecord:
        """Return the event that tells how many lines are missing before it."""
        text = "%d lines of this process were dropped here: the log was full, or nobody read it"
        return logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, text, (self._num_dropped,), None
        )

    def _line(self, record: logging.LogRecord) -> bytes:
        return self._line_start + self.format(record).encode("utf-8", "backslashreplace") + b"\n"


class LineFormatter(logging.Formatter):
    """Turns an event into fields, and by `render` into a line. Long values are cut until the line
    has at most MAX_LINE.
    """

    def __init__(self, role: str, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.role = role
        self.render = render

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record)
        line = self.render(fields)
        max_chars = MAX_LINE // 2
        while max_chars >= 16 and len(line.encode("utf-8", "backslashreplace")) >= MAX_LINE:
            shorter = {name: _shortened(value, max_chars) for name, value in fields.items()}
            line = self.render(shorter)
            max_chars //= 2

        return line

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "ts": f"{seconds}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "role": self.role,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            # A name with an underscore is a library's for itself.
            if name not in RECORD_FIELDS and not name.startswith("_"):
                fields[name] = value

        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)

        return fields


def as_json(fields: dict[str, Any]) -> str:
    """Return the line of an event as JSON."""
    safe = {}
    for name, value in fields.items():
        if isinstance(value, str):
            # Halves of surrogate pairs cannot be encoded.
            value = value.encode(errors="backslashreplace").decode()

        safe[name] = value

    try:
        line = orjson.dumps(safe, default=repr, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # A number of more than 64 bits, or a value that contains itself.
        line = orjson.dumps({name: repr(value) for name, value in safe.items()})

    return escape(line.decode())


def as_text(fields: dict[str, Any], *, has_colours: bool = False) -> str:
    """Return the line of an event as text for people."""
    extra = dict(fields)
    ts = extra.pop("ts")
    level = extra.pop("level")
    source = f"{extra.pop('role')}[{extra.pop('pid')}] {extra.pop('logger')}:"
    error = extra.pop("error", None)
    message = extra.pop("message")

    parts = [source, str(message), *(f"{name}={value}" for name, value in extra.items())]
    if error is not None:
        parts.append(str(error))

    level_text = escape(level)
    if has_colours and level in COLOURS:
        level_text = f"\x1b[{COLOURS[level]}m{level}\x1b[0m"

    return f"{ts} {level_text} {escape(' '.join(parts))}"


def _escaped(match: re.Match[str]) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return short.get(match[0]) or f"\\u{ord(match[0]):04x}"


def _shortened(value: Any, max_chars: int) -> Any:
    """Cut a long text in its middle, because the end of a traceback says most. Other long values
    become a cut repr.
    """
    if isinstance(value, int | float) or value is None:
        return value

    text = value if isinstance(value, str) else repr(value)
    if len(text) <= max_chars:
        return value

    half = max_chars // 2
    return f"{text[:half]}… {len(text) - 2 * half} characters left out …{text[-half:]}"
