"""`lmi bench` as a person types it, against real servers: one with a scripted engine, and ones that
fail.
"""

from __future__ import annotations

import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from lmi.cli import run
from lmi.client.bench import command
from lmi.client.bench.command import CLEAR_LINE
from tests.commands import Done, lmi
from tests.gateway.gateways import scripted, then_silent
from tests.scripted import Host, host
from tests.system.container import free_port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("scripted")) as server:
        yield server


def bench(folder: Path, *words: str) -> tuple[Done, dict[str, Any]]:
    """Run the command with a file of one prompt. Returns what it printed, and its JSON."""
    (folder / "prompts").write_text("say abcdefgh\n")
    report = folder / "found.json"
    with chdir(folder):
        done = lmi("bench", "--prompts", str(folder / "prompts"), "--json", str(report), *words)

    return done, json.loads(report.read_text()) if report.exists() else {}


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("loop", [("--streams", "3"), ("--rate", "100")], ids=["closed", "open"])
@pytest.mark.parametrize("dialect", ["completions", "lmi", "tgi", "triton"])
def test_streams_of_each_dialect_are_timed_and_counted(
    server: Host, tmp_path: Path, dialect: str, loop: tuple[str, str]
) -> None:
    words = (
        "--dialect",
        dialect,
        "--model",
        "scripted",
        "--requests",
        "7",
        "--max-tokens",
        "6",
        "--warmup",
        "1",
    )
    num_before = len(server.executor.requests)
    done, report = bench(tmp_path, url_of(server.port), *words, *loop)
    assert done.returncode == 0, done.stderr

    total = report["servers"][0]["total"]
    assert (total["num_ok"], total["num_tokens"]) == (7, 42)
    assert total["counted_by"] == ("events" if dialect == "triton" else "usage")
    assert len(server.executor.requests) - num_before == 8

    samples = report["servers"][0]["samples"][0]
    assert all(len(sample["times_s"]) == 6 for sample in samples)
    assert all(
        sample["due_s"] <= sample["times_s"][0] <= sample["times_s"][-1] <= sample["end_s"]
        for sample in samples
    )


@pytest.mark.parametrize("dialect", ["completions", "lmi", "tgi", "triton"])
def test_whole_answers_are_counted_where_the_server_reports_it(
    server: Host, tmp_path: Path, dialect: str
) -> None:
    words = (
        "--dialect",
        dialect,
        "--model",
        "scripted",
        "--requests",
        "4",
        "--max-tokens",
        "6",
        "--whole",
    )
    done, report = bench(tmp_path, url_of(server.port), *words)
    assert done.returncode == 0, done.stderr

    total = report["servers"][0]["total"]
    expected = (0, "nothing") if dialect == "triton" else (24, "usage")

    assert (total["num_tokens"], total["counted_by"]) == expected
    assert total["end_s"] and not total["first_s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_the_load_is_before_anything_has_ended(
    server: Host, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("hang abc\n")
    words = [
        "--dialect",
        "completions",
        "--model",
        "scripted",
        "--prompts",
        str(tmp_path / "prompts"),
    ]
    words += ["--requests", "4", "--streams", "2", "--warmup", "0", "--timeout", "1.5"]
    with redirect_stdout(io.StringIO()), redirect_stderr(Terminal()) as terminal:
        code = run(["bench", url_of(server.port), *words])

    assert code == 1

    first, *_, last = terminal.getvalue().removeprefix(CLEAR_LINE).split(CLEAR_LINE)
    assert re.fullmatch(
        r"[0-9]+ s  http://\S+: 0/4 requests with warm-up, 2 running, 0 failed, [0-9]+ tokens",
        first,
    )
    assert "2/4 requests with warm-up, 2 running, 2 failed, " in terminal.getvalue()
    assert last == ""


def test_where_nobody_looks_a_line_now_and_then_tells_it(
    server: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SAY_EVERY_S", 0.2)
    (tmp_path / "prompts").write_text("hang abc\n")
    words = (
        "--dialect",
        "completions",
        "--model",
        "scripted",
        "--prompts",
        str(tmp_path / "prompts"),
    )
    done = lmi(
        "bench", url_of(server.port), *words, "--requests", "1", "--warmup", "0", "--timeout", "1.5"
    )
    lines = [
        line for line in done.stderr.splitlines() if "0/1 requests with warm-up, 1 running" in line
    ]

    assert len(lines) > 1 and CLEAR_LINE not in done.stderr


def test_two_servers_are_asked_in_turns_and_compared(server: Host, tmp_path: Path) -> None:
    urls = (url_of(server.port), f"http://localhost:{server.port}/v1")
    words = (
        "--dialect",
        "completions",
        "--requests",
        "3",
        "--rounds",
        "2",
        "--warmup",
        "0",
        "--html",
        "page.html",
    )
    done, report = bench(tmp_path, *urls, *words, "--target-e2e-ms", "0")
    assert done.returncode == 0, done.stderr

    first, second = (server_report["samples"] for server_report in report["servers"])
    order = sorted(
        (server_report[0]["due_s"], name)
        for name, part in (("a", first), ("b", second))
        for server_report in part
    )

    assert "".join(name for _, name in order) == "abba"
    assert (
        report["ratios"]["tokens_per_s"] > 0 and report["servers"][0]["total"]["goodput_per_s"] == 0
    )
    assert "ratio" in done.stdout.splitlines()[0]
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    # The server is on this machine
    assert all(server_report["cpu_s"] for server_report in report["servers"])


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that sends these bytes to every request and closes the connection.
    Yields its port.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            # Until the listener is closed
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as request:
                        head = b"".join(iter(request.readline, b"\r\n"))
                        request.read(
                            int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                        )
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])


REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: "
    b"2\r\nConnection: "
    b"close\r\n\r\n{}"
)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(b'data:{"token":{"id":1,"text":"a"}}\n\n')
ERROR = chunk(b'data:{"error":"it broke","error_type":"generation"}\n\n') + chunk(b"")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (REFUSAL, "503"),
        (HEAD + TOKEN, "lost"),
        (HEAD + TOKEN + chunk(b""), "broken"),
        (HEAD + TOKEN + ERROR, "broken"),
        (HEAD + chunk(b"{x\n"), "broken"),
    ],
    ids=[
        "refuses",
        "dies in the middle",
        "ends too early",
        "reports an error in the middle",
        "sends what is no JSON",
    ],
)
def test_failures_are_counted_by_what_they_were(
    tmp_path: Path, answer: bytes, outcome: str
) -> None:
    with answering(answer) as port:
        words = ("--dialect", "tgi", "--requests", "5", "--streams", "2", "--html", "page.html")
        done, report = bench(tmp_path, url_of(port), *words, "--warmup", "0")
        warmed, _ = bench(tmp_path, url_of(port), *words)

    total = report["servers"][0]["total"]
    assert (done.returncode, total["outcomes"], total["num_ok"]) == (1, {outcome: 5}, 0), (
        done.stderr
    )
    assert f"failed: {outcome}" in done.stdout
    assert (
        warmed.returncode == 1 and f"answers no request of the warm-up: {outcome}" in warmed.stderr
    )


def test_a_server_that_takes_too_long_is_left_and_counted(tmp_path: Path) -> None:
    with scripted(then_silent(lambda talk: None)) as server:
        words = ("--dialect", "tgi", "--requests", "2", "--timeout", "0.2", "--warmup", "0")
        _, report = bench(tmp_path, server.url, *words)

        assert server.left.wait(60)

    assert report["servers"][0]["total"]["outcomes"] == {"timeout": 2}


def test_an_engine_that_fails_in_the_middle_of_a_stream_is_told_from_an_answer(
    server: Host, tmp_path: Path
) -> None:
    for dialect, body in (
        ("tgi", {"inputs": "fail ab"}),
        ("lmi", {"inputs": "fail ab"}),
        ("completions", {"prompt": "fail ab"}),
    ):
        words = (
            "--dialect",
            dialect,
            "--model",
            "scripted",
            "--requests",
            "2",
            "--body",
            json.dumps(body),
        )
        _, report = bench(tmp_path, url_of(server.port), *words, "--warmup", "0")

        assert report["servers"][0]["total"]["outcomes"] == {"broken": 2}, dialect


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--body", "[1]"], "--body=[1]: not a JSON object"),
        (["--body", "{"], "--body: not JSON"),
        (
            ["--dialect", "grpc"],
            "'grpc' is not one of 'chat', 'completions', 'lmi', 'tgi', 'triton'",
        ),
        (["http://b", "http://c"], "3 URLs: at most 2 servers take turns"),
        (["--model", ""], "no list at /v1/models"),
        (["--model", "a"], "answers no request of the warm-up: lost"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    done, _ = bench(tmp_path, url_of(free_port()), *words)
    assert done.returncode != 0 and said in done.stderr and len(done.stderr.splitlines()) == 1
