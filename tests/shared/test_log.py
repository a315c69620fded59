import json
import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given, strategies as st

from lmi.shared import log

HOSTILE = "a\nb\r\nc\x1b[31mred\x1b[0m\u2028d\u2029e\x85f\x00g\u202eh\ufeff\ud800"


@pytest.fixture(autouse=True)
def _loggers_are_left_as_found() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    show_warning = warnings.showwarning
    yield
    logging.captureWarnings(False)
    warnings.showwarning = show_warning
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def json_lines(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capfd.readouterr().err.split("\n") if line]


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    log_record = logging.makeLogRecord(
        {"name": "lmi.test", "levelname": "INFO", "msg": message, "args": args}
    )
    vars(log_record).update(extra)
    return log_record


def test_an_event_is_a_json_object_with_the_documented_fields(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log.setup("engine-0", format="json")
    logging.getLogger("lmi.x").info(
        "loaded %d of %d", 1, 2, extra={"request_id": "r1", "tokens": 7}
    )
    (event,) = json_lines(capfd)
    datetime.strptime(str(event.pop("ts")), "%Y-%m-%dT%H:%M:%S.%fZ")

    assert event == {
        "level": "INFO",
        "logger": "lmi.x",
        "pid": os.getpid(),
        "role": "engine-0",
        "message": "loaded 1 of 2",
        "request_id": "r1",
        "tokens": 7,
    }


def test_text_says_the_same_on_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    log.setup("frontend", format="text")
    logging.getLogger("lmi.x").warning("slow", extra={"request_id": "r1"})
    (line,) = lines(capfd)
    assert re.fullmatch(rf"\S+Z WARNING frontend\[{os.getpid()}\] lmi\.x: slow request_id=r1", line)


def on_a_terminal(level: str, **environ: str) -> str:
    """What a terminal gets of a process that logs one line of this level."""
    code = (
        f"import logging; from lmi.shared import log; log.setup('x'); "
        f"logging.getLogger().{level}('hello')"
    )
    keyboard, terminal = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code],
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", **environ},
        check=True,
    )
    os.close(terminal)
    with os.fdopen(keyboard, "rb") as screen:
        return screen.read1().decode()


@pytest.mark.parametrize(("level", "number"), [("info", 32), ("warning", 33), ("error", 31)])
def test_a_terminal_shows_levels_in_colours(level: str, number: int) -> None:
    assert f"Z \x1b[{number}m{level.upper()}\x1b[0m x[" in on_a_terminal(level, NO_COLOR="")


def test_a_line_on_a_terminal_clears_the_bar_that_it_would_follow_whose_ever_it_is() -> None:
    assert on_a_terminal("info", NO_COLOR="1").startswith("\r\x1b[2K20")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_wants_no_colours_gets_none(environ: dict[str, str]) -> None:
    assert "Z ERROR x[" in on_a_terminal("error", **environ)
    assert ("\x1b" in on_a_terminal("error", **environ)) == ("NO_COLOR" in environ)


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_message_extra_or_traceback_can_make_a_second_line(
    capfd: pytest.CaptureFixture[str], format: str
) -> None:
    log.setup("x", format=format)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("a\nb").exception(
            "%s", HOSTILE, extra={"request_id": HOSTILE, "k\n": HOSTILE}
        )

    output = capfd.readouterr().err
    assert output.count("\n") == 1 and output.endswith("\n")
    assert output[:-1].isprintable()
    assert "Traceback" in output and "ValueError" in output


def test_what_a_library_adds_to_each_record_for_itself_is_left_out() -> None:
    event = record("hello", _ray_timestamp_ns=1, request_id="r1")
    fields = json.loads(log.LineFormatter("x", log.as_json).format(event))
    assert fields["request_id"] == "r1" and "_ray_timestamp_ns" not in fields


def test_a_json_line_gives_the_message_back_unharmed(capfd: pytest.CaptureFixture[str]) -> None:
    log.setup("x", format="json")
    logging.getLogger().error("%s", HOSTILE[:-1])
    (event,) = json_lines(capfd)
    assert event["message"] == HOSTILE[:-1]


@given(
    st.text(),
    st.dictionaries(
        st.sampled_from(["request_id", "route", "n"]), st.text() | st.integers() | st.floats()
    ),
)
def test_any_event_is_one_line_in_both_forms(message: str, extra: dict[str, object]) -> None:
    event = record("%s", message, **extra)
    as_json = log.LineFormatter("x", log.as_json).format(event)
    as_text = log.LineFormatter("x", log.as_text).format(event)

    assert len(as_json.splitlines()) == len(as_text.splitlines()) == 1
    assert set(extra) <= set(json.loads(as_json))


@pytest.mark.parametrize("character", ["a", "ü", "😀", "\n", "\x00", '"', "\ud800", "\u2028"])
@pytest.mark.parametrize(
    "formatter", [log.LineFormatter("x", log.as_json), log.LineFormatter("x", log.as_text)]
)
@pytest.mark.parametrize("num", [1000, 16_000, 17_000, 100_000])
def test_a_line_is_never_longer_than_the_limit(
    character: str, formatter: log.LineFormatter, num: int
) -> None:
    line = formatter.format(record("%s", character * num, request_id="r1", extra=character * num))
    assert len(line.encode("utf-8", "backslashreplace")) < log.MAX_LINE
    assert "r1" in line
    if formatter.render is log.as_json:
        assert json.loads(line)["request_id"] == "r1"

    if num >= 17_000:
        assert "characters left out" in line


def test_a_long_traceback_keeps_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    log.setup("x", format="json")
    try:
        raise ValueError("x" * 50_000 + " the cause")
    except ValueError:
        logging.getLogger().exception("failed")

    (event,) = json_lines(capfd)
    assert event["message"] == "failed" and str(event["error"]).endswith(" the cause")


def test_values_that_json_lacks_do_not_lose_the_event(capfd: pytest.CaptureFixture[str]) -> None:
    log.setup("x", format="json")
    ring: list[object] = []
    ring.append(ring)
    for value in (2**80, float("nan"), b"\xff", object(), {1: 2}, ring, {"k": "\ud800"}):
        logging.getLogger().info("value", extra={"value": value})

    events = json_lines(capfd)
    assert len(events) == 7 and all("value" in event for event in events)


def test_the_loggers_of_gunicorn_and_uvicorn_obey(capfd: pytest.CaptureFixture[str]) -> None:
    for name in log.FOREIGN:
        logger = logging.getLogger(name)
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.propagate = False
        logger.setLevel(logging.DEBUG)

    log.setup("frontend", "WARNING", "json")
    for name in log.FOREIGN:
        logging.getLogger(name).info("too quiet")
        logging.getLogger(name).error("heard")

    assert [event["logger"] for event in json_lines(capfd)] == list(log.FOREIGN)


def test_the_level_is_obeyed_and_setting_up_twice_writes_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log.setup("x", "DEBUG", "json")
    log.setup("x", "ERROR", "json")
    logging.getLogger("lmi.x").warning("no")
    logging.getLogger("lmi.x").error("yes")
    assert [event["message"] for event in json_lines(capfd)] == ["yes"]


def test_auto_is_json_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    log.setup("x")
    logging.getLogger().info("hello")
    assert [event["message"] for event in json_lines(capfd)] == ["hello"]


def test_a_warning_of_python_is_an_event_too() -> None:
    code = (
        "import warnings; from lmi.shared import log; log.setup('x', format='json'); "
        "warnings.warn('two\\nlines')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert (
        json.loads(line)["logger"] == "py.warnings" and "two\nlines" in json.loads(line)["message"]
    )


def test_a_full_disk_stops_nothing() -> None:
    with open("/dev/full", "wb") as full:
        handler = log.LineHandler(log.LineFormatter("x", log.as_json), full.fileno())
        handler.emit(record("lost"))


def test_lines_of_several_processes_do_not_mix() -> None:
    code = (
        "import logging, sys; from lmi.shared import log; log.setup(sys.argv[1], format='json')\n"
        "logging.getLogger().handlers[0].sink = log.Sink(2, max_wait_s=30.0)  # no line is "
        "dropped\n"
        "for i in range(200): logging.getLogger().info(sys.argv[1] * 1500)"
    )
    reader, writer = os.pipe()
    children = [
        subprocess.Popen([sys.executable, "-c", code, role], stderr=writer) for role in "abc"
    ]
    os.close(writer)
    with os.fdopen(reader) as pipe:
        events = [json.loads(line) for line in pipe]

    assert [child.wait() for child in children] == [0, 0, 0]
    assert len(events) == 600
    assert all(event["message"] == event["role"] * 1500 for event in events)
