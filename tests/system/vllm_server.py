"""A server with the real vLLM that loses a process while streams run: what its clients hear, and
that it comes back.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from tests.machine import Measurement, pause_after
from tests.served import Server
from tests.system.container import wait_until

NUM_STREAMS = 32
# On a busy machine a step of two ranks takes seconds
STEP_TIMEOUT_S = 6.0
# A busy machine takes long to import vllm
BACK_S = 180.0
LONG = {
    "inputs": "abc",
    "stream": True,
    "parameters": {"max_new_tokens": 32_000, "ignore_eos_token": True},
}
SHORT = {"inputs": "abc", "parameters": {"max_new_tokens": 20}}
SETTINGS = (
    "option.rolling_batch=vllm",
    "option.dtype=fp32",
    "option.max_kv_cache_tokens=262144",
    f"step_timeout={STEP_TIMEOUT_S}",
    "retry_threshold=20",
    "frontend_workers=1",
)
ENGINE = "lmi-engine-0"


def family(server: Server) -> dict[str, list[int]]:
    """The pids of the engine process and of all processes that it started, by name."""
    pids: dict[str, list[int]] = {}
    for pid in server.pids():
        with suppress(OSError):
            if os.getpgid(pid) == server.pid("lmi-engine"):
                pids.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)

    return pids


def pids_of(family: dict[str, list[int]]) -> set[int]:
    return {pid for pids in family.values() for pid in pids}


def segments(pids: Iterable[int]) -> set[str]:
    """The files of shared memory that these processes map."""
    messages: set[str] = set()
    for pid in pids:
        messages.update(
            re.findall(r" (/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
        )

    return messages


def hurt(
    server: Server,
    victim: str,
    signum: signal.Signals,
    within_s: float,
    num_streams: int = NUM_STREAMS,
) -> None:
    """While streams run, one process gets a signal. Every client's stream ends in time, and nothing
    is left.

    It is measured once, since another try needs another start of the engine.
    """
    before = family(server)
    shared = segments(pids_of(before))
    with streaming(server, num_streams) as streams, Measurement(is_last=True).within(within_s):
        os.kill(before[victim][0], signum)
        wait_until(lambda: server.ping() == 503, "/ping reports it")
        ends = [end_of(stream) for stream in streams]

    assert all("engine" in last["error"] and last["code"] == 503 for last in ends), ends

    wait_until(lambda: not pids_of(before) & set(server.pids()), "none of its processes is left")
    wait_until(lambda: not any(map(os.path.exists, shared)), "nor what they shared")


def recovers(server: Server, num_processes: dict[str, int]) -> None:
    """Wait until an engine of so many processes, by name, answers."""
    wait_until(lambda: server.ping() == 200, "the engine is back", BACK_S)
    assert {name: len(pids) for name, pids in family(server).items()} == num_processes
    assert server.post(SHORT).status == 200


@contextmanager
def streaming(server: Server, num_streams: int) -> Iterator[list[socket.socket]]:
    """Connections of `num_streams` running streams. They are not read yet, so that the test can
    send other requests.

    While the engine works, a busy machine may keep the test from its work for many seconds. Then a
    request comes too late for the server, or the first streams are over before the last one begins,
    and all begin again.
    """
    wait_until(
        lambda: server.ping() == 200, "the engine is back, if the test before ended early", BACK_S
    )
    deadline_s = time.monotonic() + 300
    while True:
        with ExitStack() as stack:
            before = num_ended(server.metrics())
            streams = [stack.enter_context(server.connect(LONG)) for _ in range(num_streams)]
            if all_run(server, num_streams, before, deadline_s):
                yield streams
                return

        wait_until(
            lambda: server.metrics()["lmi_requests_in_flight"] == 0, "the others are cancelled", 60
        )


def all_run(server: Server, num_streams: int, before: Counter[str], deadline_s: float) -> bool:
    """Wait until all streams run. Returns False if one was too late or is over, so that they cannot
    run together.
    """
    started_s = time.monotonic()
    while True:
        metrics = server.metrics()
        if metrics["lmi_requests_running"] == num_streams:
            return True

        ended = num_ended(metrics) - before
        # The last two are of the try before
        is_wrong = ended.keys() - {
            "408",
            "length",
            "200",
            "499",
            "cancelled",
        }
        if is_wrong or time.monotonic() > deadline_s:
            log = "\n".join(server.log.read_text().splitlines()[-100:])
            raise AssertionError(f"not all streams run; ended: {dict(ended)}; {metrics}\n{log}")

        if ended.keys() & {"408", "length"}:
            return False

        time.sleep(pause_after(time.monotonic() - started_s))


def num_ended(metrics: dict[str, float]) -> Counter[str]:
    """How many requests have ended, by status, and how many generations, by reason."""
    families = ("lmi_requests_total{", "lmi_finished_total{")
    return Counter(
        {
            name.split('"')[1]: round(value)
            for name, value in metrics.items()
            if name.startswith(families)
        }
    )


def end_of(stream: socket.socket) -> dict[str, Any]:
    """The last line of a stream."""
    with HTTPResponse(stream) as response:
        response.begin()
        last: dict[str, Any] = json.loads(response.read().splitlines()[-1])

    return last


def refuses_a_grammar_and_leaves_no_raw_line(server: Server) -> None:
    """The compiler of grammars is C++, in the engine's process or in one that vLLM spawns, and
    warns on its own.
    """
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 4, "guided_regex": r"a$b\b"}}
    assert server.post(body).status >= 400
    assert server.post(SHORT).status == 200
    warnings = [
        line for line in server.log_lines() if "'$' should be at the end" in line.get("message", "")
    ]
    assert warnings and {line["level"] for line in warnings} == {"WARNING"}
    for line in server.log_lines():
        assert {"ts", "level", "role", "message"} <= line.keys() or "event" in line
        assert '"message":' not in line.get("message", ""), "a line of our form is in another"

    roles = {line["role"] for line in server.log_lines() if "role" in line}
    assert "engine 0" in roles, roles
