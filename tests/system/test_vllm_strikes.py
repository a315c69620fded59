"""A server with the real vLLM in the engine's process, which is killed and stopped
while it works.
"""

from __future__ import annotations

import signal

import pytest

from tests.served import Server
from tests.system.vllm_server import (
    ENGINE,
    STEP_TIMEOUT_S,
    hurt,
    recovers,
    refuses_a_grammar_and_leaves_no_raw_line,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_start_is_told_in_a_few_lines_of_our_form(inside: Server) -> None:
    lines = inside.log_lines()
    is_ready = [line.get("event") == "ready" for line in lines]
    start = lines[: is_ready.index(True)]
    told = [
        line
        for line in start
        if "level" in line and "gave this process no time" not in line["message"]
    ]

    assert len(told) < 20
    assert [line["message"] for line in told if line["level"] != "INFO"] == []

    ready = lines[len(start)]
    assert {"import", "configuration", "weights", "kv cache", "kernels", "warm-up"} <= set(
        str(ready).split("'")
    ), ready


def test_streams_end_when_the_engine_is_killed(inside: Server) -> None:
    hurt(inside, ENGINE, signal.SIGKILL, within_s=2)
    recovers(inside, {ENGINE: 1})


def test_a_refused_grammar_leaves_no_raw_line_in_the_log(inside: Server) -> None:
    refuses_a_grammar_and_leaves_no_raw_line(inside)


def test_streams_end_when_the_engine_stands_still(inside: Server) -> None:
    """The last of those that share this server."""
    hurt(inside, ENGINE, signal.SIGSTOP, within_s=STEP_TIMEOUT_S + 3)
    # Nobody needs the engine that starts
    inside.kill()
