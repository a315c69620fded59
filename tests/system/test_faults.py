"""Clients that leave, stall, send too much or send nonsense, and a full disk: no other client
notices.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.machine import measurements
from tests.served import Server, launch, readable, resident_bytes
from tests.system.container import wait_until, write_model

MB = 1 << 20
# For refusals that must come at once, on a busy machine
SLOW_S = 0.5
# For up to a whole context of tokens on such a machine
GENERATION_S = 5.0
PING_S = 0.25


def request(prompt: str = "The quick", **parameters: object) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": 8, "details": True, **parameters}}


# Bad input. After each of these the next request is answered, and no client waits.


def encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def body(prompt: str = "The quick", **parameters: object) -> bytes:
    return encoded(request(prompt, **parameters))


def with_values(values: bytes) -> bytes:
    return b'{"inputs": "a", "x": %b}' % values


# A body, or what makes one of megabytes when its test runs: each process of the tests imports this.
Body = bytes | Callable[[], bytes]


def made(body: Body) -> bytes:
    return body if isinstance(body, bytes) else body()


SAMPLED = {"do_sample": True, "seed": 1}
MALFORMED: dict[str, Body] = {
    "nothing": b"",
    "not JSON": b"inputs=a",
    "half of it": b'{"inputs": "a',
    "a trailing comma": b'{"inputs": "a",}',
    "NaN": b'{"inputs": "a", "parameters": {"temperature": NaN}}',
    "Infinity": b'{"inputs": "a", "parameters": {"temperature": -Infinity}}',
    "1e999": b'{"inputs": "a", "parameters": {"temperature": 1e999}}',
    "bad UTF-8": b'{"inputs": "\xff\xfe"}',
    "overlong UTF-8": b'{"inputs": "\xc0\xaf"}',
    "a lone surrogate": b'{"inputs": "\\ud800"}',
    "UTF-16": '{"inputs": "a"}'.encode("utf-16"),
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"inputs": "a"}',
    "a deep list": lambda: with_values(b"[" * 100_000 + b"]" * 100_000),
    "a deep object": lambda: with_values(b'{"a": ' * 100_000 + b"1" + b"}" * 100_000),
    "a deep list without end": lambda: with_values(b"[" * 4 * MB),
    "twenty million lists": lambda: with_values(b"[%b[]]" % (b"[]," * 20 * MB)),
    "twelve million strings": lambda: with_values(b'[%b""]' % (b'"ab",' * 12 * MB)),
    "a list": b"[1]",
    "inputs of a wrong type": b'{"inputs": 5}',
    "a list of inputs": lambda: b'{"inputs": [%b"a"]}' % (b'"a",' * 10 * MB),
    "parameters of a wrong type": b'{"inputs": "a", "parameters": 5}',
    "stream of a wrong type": b'{"inputs": "a", "stream": 1}',
}
REFUSED: dict[str, Body] = {
    "a negative length": body(max_new_tokens=-1),
    "no length": body(max_new_tokens=0),
    "a length over 64 bits": body(max_new_tokens=10**30),
    "half a token": body(max_new_tokens=1.5),
    "a length as text": body(max_new_tokens="5"),
    "a prompt over the context": body("ab " * 2000),
    "a prompt of 6 MB": lambda: body("ab " * (2 * MB)),
    "a prompt of 25 MB": lambda: body("a" * (25 * MB)),
    "more stop strings than are allowed": body(stop_sequences=["x"] * 65),
    "a hundred thousand stop strings": lambda: body(
        stop_sequences=[f"x{n}" for n in range(100_000)]
    ),
    "a long stop string": body(stop_sequences=["x" * 100_000]),
    "an empty stop string": body(stop_sequences=[""]),
    "a stop token that is none": body(stop_token_ids=[10**9]),
    "more log-probs than tokens": body(logprobs=10**6),
    "a seed over 64 bits": body(**{**SAMPLED, "seed": 2**64}),
    "a top_p over 1": body(**SAMPLED, top_p=1.01),
    "more tokens than there may be": body(min_tokens=9),
    "a temperature over all bounds": body(**SAMPLED, temperature=1e308),
    "a penalty next to zero": body(repetition_penalty=1e-300),
    "a penalty over all bounds": body(frequency_penalty=-1e308),
}
SERVED: dict[str, Body] = {
    "a length over the context": body(max_new_tokens=2**40),
    "a temperature next to zero": body(**SAMPLED, temperature=5e-324),
    "nuclei of nothing": body(**SAMPLED, top_p=1e-300, min_p=1, typical_p=1e-300),
    "every word banned": body(bad_sequences=[chr(code) for code in range(33, 500)]),
    "all stop strings that are allowed": body(
        stop_sequences=[f"never {n}" + "x" * 900 for n in range(64)]
    ),
    "a control character in every place": body("\x00\x1b[2J\u2028\r\n" * 20),
    "a prompt of 20 MB, cut": lambda: body("a " * (10 * MB), truncate=10),
}
"""Odd, but nothing is wrong with them."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OPENAI: dict[str, dict[str, Any]] = {
    "a bias of a token that is none": {"prompt": "a", "logit_bias": {"1000000000": 1}},
    "a prompt of tokens that are none": {"prompt": [1, 10**9]},
    "a chat of a hundred thousand messages": {
        "messages": [{"role": "user", "content": "a"}] * 100_000
    },
    "a chat of 5 MB": {"messages": [{"role": "user", "content": "a " * (5 * MB // 2)}]},
    "ten thousand tools": {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [TOOL] * 10_000,
    },
}
CORPUS: dict[str, tuple[Body, int, bool]] = {
    **{name: (partial(encoded, fields), 400, True) for name, fields in OPENAI.items()},
    **{name: (data, 424, False) for name, data in MALFORMED.items()},
    **{name: (data, 424, True) for name, data in REFUSED.items()},
    **{name: (data, 200, True) for name, data in SERVED.items()},
}


@pytest.mark.parametrize("name", CORPUS)
def test_whatever_is_sent_the_next_request_is_answered(tiny: Server, name: str) -> None:
    body, status, is_understood = CORPUS[name]
    data = made(body)

    for measurement in measurements():
        within_s = (GENERATION_S if status == 200 else SLOW_S) + len(data) / (20 * MB)
        with ThreadPoolExecutor(1) as pool, measurement.within(within_s):
            future = pool.submit(tiny.post, data)
            while not future.done():
                with measurement.within(PING_S + len(data) / (80 * MB)):
                    tiny.ping()

    answer = future.result()
    assert answer.status == status, answer.body[:300]
    assert len(answer.body) < 4096 or status == 200

    if status == 424:
        fields = json.loads(answer.body)
        assert fields["code"] == 424 and len(fields["error"]) < 300
        assert ("details" in fields) == is_understood

    assert tiny.post(request()).status == 200


@pytest.mark.parametrize("has_length", [True, False], ids=["announced", "chunked"])
def test_a_body_over_the_limit_is_413_and_not_kept(tiny: Server, has_length: bool) -> None:
    before = {pid: resident_bytes(pid) for pid in tiny.pids("lmi-front")}
    with tiny.connect_raw() as connection:
        size = b"Content-Length: 104857600" if has_length else b"Transfer-Encoding: chunked"
        connection.sendall(b"POST /invocations HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % size)
        # The server may close before it has read all
        with suppress(OSError):
            for _ in range(100):
                connection.sendall(b"a" * MB if has_length else b"%x\r\n%b\r\n" % (MB, b"a" * MB))

        head, _, answer = connection.recv(65536).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 413 "), head
    assert json.loads(answer)["code"] == 413 and b"67108864" in answer

    wait_until(
        lambda: all(resident_bytes(pid) - size < 32 * MB for pid, size in before.items()),
        "it is not kept",
    )

    assert tiny.post(request()).status == 200


def test_neighbours_of_poisonous_requests_are_answered_as_ever(tiny: Server) -> None:
    """Sixteen streams are open while the whole corpus of odd requests comes, and none of them
    changes by a token.
    """
    bodies = [
        request(f"neighbour {n}", max_new_tokens=600, ignore_eos_token=True) for n in range(16)
    ]
    small = [data for body, _, _ in CORPUS.values() if len(data := made(body)) < MB]
    with ThreadPoolExecutor(32) as pool:
        alone = [pool.submit(tiny.post, {**fields, "stream": True}) for fields in bodies]
        expected = [future.result().body for future in alone]
        streams = [pool.submit(tiny.post, {**fields, "stream": True}) for fields in bodies]
        engine = tiny.engines()[0]
        wait_until(lambda: engine.num_running >= 8, "the neighbours are there")
        statuses = [pool.submit(tiny.post, data) for data in small]

        assert {future.result().status for future in statuses} == {200, 400, 424}
        assert [future.result().body for future in streams] == expected


# Clients that leave.

LONG = request("a " * 75, max_new_tokens=800, ignore_eos_token=True)
"""Takes 800 steps, and leaves no room in the small cache for a prompt of 860 tokens."""


def running(server: Server, num_running: int, num_waiting: int = 0) -> None:
    engine = server.engines()[0]
    wait_until(
        lambda: (engine.num_running, engine.num_waiting) == (num_running, num_waiting),
        f"{num_running} requests run and {num_waiting} wait",
    )


@contextmanager
def one_cancelled(server: Server, max_steps: int) -> Iterator[None]:
    """The body ends one request and frees what it held before the engine makes
    `max_steps` steps.
    """
    before = server.metrics()
    yield
    wait_until(server.is_idle, "its blocks are free")
    after = server.metrics()
    name = 'lmi_finished_total{finish_reason="cancelled"}'
    assert after[name] == before[name] + 1
    assert after["lmi_engine_steps_total"] - before["lmi_engine_steps_total"] < max_steps


def test_a_client_that_leaves_its_stream_frees_what_it_held(tight: Server) -> None:
    with one_cancelled(tight, max_steps=800):
        with tight.open({**LONG, "stream": True}) as response:
            assert response.readline() and response.readline()
            wait_until(lambda: tight.metrics()["lmi_kv_cache_usage_ratio"] > 0.1, "it holds blocks")


def test_a_client_that_does_not_wait_for_a_whole_answer_frees_what_it_held(tight: Server) -> None:
    with one_cancelled(tight, max_steps=800):
        with tight.connect(LONG):
            running(tight, 1)


def test_a_client_that_closes_only_its_sending_half_counts_as_gone(tight: Server) -> None:
    with one_cancelled(tight, max_steps=800):
        with tight.connect(LONG) as connection:
            running(tight, 1)
            connection.shutdown(socket.SHUT_WR)
            wait_until(tight.is_idle, "nothing runs though the connection is half open")


def test_a_client_that_leaves_the_queue_never_reaches_the_engine(tight: Server) -> None:
    """The first request takes its 800 steps; the second would take 100 more."""
    with one_cancelled(tight, max_steps=850):
        with tight.connect(LONG) as first:
            running(tight, 1)
            with tight.connect(request("a " * 430, max_new_tokens=100, ignore_eos_token=True)):
                running(tight, 1, num_waiting=1)

            running(tight, 1)
            assert first.recv(100).startswith(b"HTTP/1.1 200 "), "the first was hurt"


# Clients that do not read.


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine without a model, quick enough to fill a connection; a stalled client has two
    seconds.
    """
    settings = {
        "option.echo_step_ms": 1,
        "stall_timeout": STALL_S,
        "frontend_workers": 1,
        "log_format": "text",
    }

    folder = write_model(
        tmp_path_factory.mktemp("echo") / "a\x1b[31m\u2028b",
        **settings,
        max_body_memory=f"{BODY_MEMORY // MB}m",
    )
    with launch(folder) as server:
        server.wait_ready()
        yield server


STALL_S = 2.0
ENDLESS = {"inputs": "abc", "stream": True, "parameters": {"max_new_tokens": 90_000}}


def test_a_client_that_stops_reading_is_given_up_and_costs_no_memory(echo: Server) -> None:
    [front_end] = echo.pids("lmi-front")
    before_bytes = resident_bytes(front_end)
    stalled = [echo.connect(ENDLESS, receive_bytes=4096) for _ in range(8)]
    try:
        running(echo, 8)
        most_bytes = 0

        def is_over() -> bool:
            nonlocal most_bytes
            most_bytes = max(most_bytes, resident_bytes(front_end))
            return echo.is_idle()

        wait_until(is_over, "the generations were cancelled")
        assert most_bytes - before_bytes < 64 * MB
        assert echo.metrics()['lmi_requests_total{code="499"}'] == 8
    finally:
        for connection in stalled:
            connection.close()


# Clients that do not finish their requests.

BODY_MEMORY = 64 * MB
UNFINISHED = {
    "announced": (b"Content-Length: %d" % (16 * MB), b"a" * 8 * MB),
    "chunked": (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n" % (8 * MB, b"a" * 8 * MB)),
}


@pytest.mark.parametrize("kind", UNFINISHED)
def test_bodies_that_do_not_end_take_no_more_memory_than_they_may(echo: Server, kind: str) -> None:
    """Twenty clients send 160 MB. Those over the limit are refused, and all memory is freed when
    they leave.
    """
    [front_end] = echo.pids("lmi-front")
    before_bytes = resident_bytes(front_end)
    field, data = UNFINISHED[kind]
    clients = [echo.connect_raw() for _ in range(20)]
    try:
        for client in clients:
            # It was refused, and its answer is unread
            with suppress(OSError):
                client.sendall(
                    b"POST /invocations HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % field + data
                )

        wait_until(lambda: len(readable(clients)) >= 12, "most have an answer")
        for measurement in measurements():
            with measurement.within(GENERATION_S):
                assert echo.post(request("abc")).status == 200

            with measurement.within(PING_S):
                assert echo.ping() == 200

        assert resident_bytes(front_end) - before_bytes < BODY_MEMORY + 32 * MB

        refused = readable(clients)
        assert all(client.recv(13) == b"HTTP/1.1 503 " for client in refused)
    finally:
        for client in clients:
            client.close()

    wait_until(echo.is_idle, "their bytes are not counted any more")
    wait_until(lambda: resident_bytes(front_end) - before_bytes < 8 * MB, "the memory is back")


def test_long_prompts_take_no_more_memory_than_they_may_while_an_engine_is_stopped_or_works(
    echo: Server,
) -> None:
    """Twelve clients send 48 MB of prompts, of which ten tokens are kept each."""
    [front_end] = echo.pids("lmi-front")
    [engine] = echo.pids("lmi-engine")
    record = echo.block().frontends[0]
    before_bytes = resident_bytes(front_end)
    grown_bytes = [0]
    data = body("abc " * MB, truncate=10)

    def is_answered_or(condition: Callable[[], bool]) -> bool:
        grown_bytes.append(resident_bytes(front_end) - before_bytes)
        return condition() or all(answer.done() for answer in answers)

    with ThreadPoolExecutor(12) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            answers = [pool.submit(echo.post, data) for _ in range(12)]
            wait_until(lambda: is_answered_or(lambda: record.num_body_bytes > 8 * MB), "they come")
            wait_until(lambda: is_answered_or(lambda: record.num_body_bytes < MB), "all are read")
        finally:
            # On a busy machine it may have been replaced
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)

        wait_until(lambda: is_answered_or(bool), "all are answered")

    assert {answer.result().status for answer in answers} <= {200, 503}
    # Two of such bodies are read at a time
    assert max(grown_bytes) < BODY_MEMORY + 16 * MB


def test_the_memory_of_large_bodies_comes_back(echo: Server) -> None:
    """The first sizes make the C library keep such blocks. Then comes a body of many pieces, over
    the limit.
    """
    [front_end] = echo.pids("lmi-front")
    before_bytes = resident_bytes(front_end)
    for size in (25 * MB, 31 * MB):
        assert echo.post(b'{"inputs": "%b"' % (b"a" * size)).status == 424
        assert echo.post(b'{"inputs": "%b"}' % (b"a" * size)).status == 424

    with echo.connect_raw() as connection, suppress(OSError):
        connection.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(70):
            connection.sendall(b"%x\r\n%b\r\n" % (MB, b"a" * MB))

    wait_until(lambda: resident_bytes(front_end) - before_bytes < 8 * MB, "the memory is back")


# Clients whose request target is not a path.


@pytest.mark.parametrize(("method", "status"), [("OPTIONS", 405), ("GET", 400)])
def test_a_request_of_the_server_as_a_whole_is_refused_and_logged_with_its_status(
    echo: Server, method: str, status: int
) -> None:
    start = echo.log.stat().st_size
    counted = f'lmi_requests_total{{code="{status}"}}'
    before = echo.metrics()[counted]
    head, _, answer = say(echo, b"%b * HTTP/1.1\r\nHost: a\r\n\r\n" % method.encode()).partition(
        b"\r\n\r\n"
    )

    assert head.startswith(b"HTTP/1.1 %d " % status) and json.loads(answer)["code"] == status
    assert echo.metrics()[counted] == before + 1

    [line] = [
        line for line in echo.log.read_bytes()[start:].splitlines() if b"request target" in line
    ]

    assert b" %d " % status in line


# Clients that write into the log.

EVIL = "\r\n{}\x1b[31m\x00\x85\u2028\u202e2026-01-01T00:00:00.000Z INFO front end[1] forged: line"
EVIL_HEADERS = (
    "X-Request-Id",
    "X-Amzn-SageMaker-Inference-Id",
    "X-Amzn-SageMaker-Custom-Attributes",
    "Content-Type",
)


def evil_requests() -> list[bytes]:
    """Raw requests with hostile text in every place that may reach the log, as far as the parser
    allows it.
    """
    quoted = quote(EVIL, safe="")
    # With these characters the parser refuses the request
    odd = re.sub("[\r\n\x00\x1b]", "", EVIL).encode()
    data = json.dumps(
        {"inputs": "a", EVIL: 1, "parameters": {EVIL: 1, "stop": EVIL, "output_formatter": EVIL}}
    ).encode()
    plain = b'{"inputs": "a"}'
    requests = [
        raw(b"POST", b"/predictions/" + quoted.encode(), plain),
        raw(b"POST", b"/predictions/model/" + quoted.encode(), plain),
        raw(b"GET", b"/" + quoted.encode(), b""),
        raw(b"POST", b"/invocations?" + quoted.encode(), plain),
        raw(b"POST", b"/invocations", data),
        raw(
            b"POST", b"/invocations", json.dumps({"inputs": "a", "parameters": {EVIL: 1}}).encode()
        ),
        raw(b"POST", b"/invocations", plain, b"Content-Encoding: " + odd),
    ]
    return requests + [
        raw(b"POST", b"/invocations", plain, name.encode() + b": " + odd) for name in EVIL_HEADERS
    ]


def raw(method: bytes, path: bytes, data: bytes, header: bytes = b"X-Nothing: 1") -> bytes:
    head = b"%b %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n%b\r\n\r\n"
    return head % (method, path, len(data), header) + data


def say(server: Server, data: bytes) -> bytes:
    with server.connect_raw() as connection:
        connection.sendall(data)
        heard = b""
        while piece := connection.recv(65536):
            heard += piece

        return heard


def new_lines(server: Server, requests: list[bytes]) -> list[str]:
    """Send the requests and return the lines of the log about them."""
    start = server.log.stat().st_size
    for data in requests:
        head = say(server, data).partition(b"\r\n\r\n")[0]
        assert head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4")), head
        assert len(head) < 4096 and b"forged" not in head

    wait_until(
        lambda: server.log.read_bytes()[start:].count(b"lmi.access") == len(requests),
        "each has its line",
    )
    text = server.log.read_bytes()[start:].decode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", text)
    return text.split("\n")[:-1]


def test_no_client_can_forge_a_line_of_the_json_log(tiny: Server) -> None:
    events = [json.loads(line) for line in new_lines(tiny, evil_requests())]
    assert all({"ts", "level", "logger", "role", "message"} <= set(event) for event in events)
    assert len([event for event in events if event["logger"] == "lmi.access"]) == len(
        evil_requests()
    )
    assert any("forged" in event["message"] for event in events), (
        "nothing evil came to the log at all"
    )


def test_no_client_can_forge_a_line_of_the_log_for_people(echo: Server) -> None:
    lines = new_lines(echo, evil_requests())

    # Beside the front end another process of the server may say something
    of_ours = re.compile(
        r"\d{4}-\d\d-\d\dT[0-9:.]+Z [A-Z]+ "
        r"(supervisor|gunicorn|(front end|engine) 0)\[\d+\] [\w.]+: "
    )
    assert [line for line in lines if not of_ours.match(line)] == []
    assert any("forged" in line for line in lines), "nothing evil came to the log at all"
    assert b"\x1b" not in echo.log.read_bytes(), "the name of the folder paints the banner"


# A full disk.

SMALL_DISK = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=256k tmpfs "$TMPDIR" && exec "$@"',
    "sh",
]
"""Runs a command with a folder for temporary files that holds 256 KB and that no other process
sees.
"""


@pytest.fixture
def small_disk() -> list[str]:
    if subprocess.run(
        [*SMALL_DISK, "true"], env={**os.environ, "TMPDIR": "/mnt"}, capture_output=True
    ).returncode:
        pytest.skip("this user may not mount a file system of its own")

    return SMALL_DISK


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path: Path) -> None:
    with launch(
        write_model(tmp_path / "model"), command_prefix=["prlimit", "--fsize=1000"]
    ) as server:
        assert server.wait() == 1
        [line] = server.log_lines()
        assert (
            line["event"] == "failed"
            and "TMPDIR" in line["message"]
            and "File too large" in line["message"]
        )


def test_a_disk_that_fills_up_stops_neither_the_server_nor_the_next_engine(
    tmp_path: Path, small_disk: list[str]
) -> None:
    with launch(write_model(tmp_path / "model"), command_prefix=small_disk) as server:
        server.wait_ready()
        engine = server.pid("lmi-engine")
        inside = Path(f"/proc/{engine}/root{server.environ['TMPDIR']}")
        with pytest.raises(OSError, match="No space left"):
            (inside / "filler").write_bytes(bytes(MB))

        assert server.post(request("abc")).status == 200

        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: server.pids("lmi-engine") not in ([], [engine]), "there is a new engine")
        wait_until(lambda: server.ping() == 200, "it is ready")

        assert server.post(request("abc")).status == 200
        assert server.metrics()["lmi_engine_restarts_total"] == 1
