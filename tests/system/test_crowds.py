"""Many clients at once: what they send is bounded, and others are answered between them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.machine import measurements, wait_until
from tests.served import launch, readable, resident_bytes
from tests.system.container import write_model

MB = 1 << 20
PING_S = 0.1
LONG = {"inputs": "abc", "parameters": {"max_new_tokens": 1000}}
SENDERS = """
import contextlib, socket, sys, threading

def send():
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60) as connection, contextlib.suppress(OSError):
        connection.sendall(b"POST /invocations HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 60000000\\r\\n\\r\\n")
        for _ in range(56):
            connection.sendall(piece)

piece = bytes(1_000_000)
for _ in range(60):
    threading.Thread(target=send).start()
"""  # noqa: E501


def cpu_seconds(pid: int) -> float:
    """For how long a process has run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_pings_are_answered_at_once_while_sixty_large_bodies_are_sent(tmp_path: Path) -> None:
    with launch(write_model(tmp_path / "model", frontend_workers=1)) as server:
        server.wait_ready()
        [front_end] = server.pids("lmi-front")
        for measurement in measurements():
            with subprocess.Popen([sys.executable, "-c", SENDERS, str(server.port)]) as senders:
                while senders.poll() is None:
                    before_s = cpu_seconds(front_end)
                    with measurement.within(PING_S):
                        assert server.ping() == 200

                    assert cpu_seconds(front_end) - before_s < 0.4, (
                        "it did much else first, whoever had the cores"
                    )

        assert server.metrics()['lmi_requests_total{code="503"}'] > 0, (
            "more were sent than there is memory for"
        )

        wait_until(server.is_idle, "nothing of them is left")


def test_a_crowd_is_queued_up_to_the_limit_and_refused_beyond_it_and_pings_go_on(
    tmp_path: Path,
) -> None:
    """The engine hardly moves, so whoever is let in waits until the crowd leaves."""
    options = {"option.echo_step_ms": 1000, "job_queue_size": 300, "frontend_workers": 1}
    with launch(write_model(tmp_path / "model", **options)) as server:
        server.wait_ready()
        [front_end] = server.pids("lmi-front")
        before_bytes = resident_bytes(front_end)
        crowd = [server.connect(LONG) for _ in range(800)]

        def num_let_in() -> float:
            return server.metrics()["lmi_requests_in_flight"]

        try:
            wait_until(
                lambda: len(readable(crowd)) + num_let_in() == len(crowd),
                "each is let in or refused",
            )
            assert 64 <= num_let_in() <= 300 + 64, "no more than wait and run"

            heads = [
                connection.recv(65536).partition(b"\r\n\r\n")[0].lower()
                for connection in readable(crowd)
            ]

            assert all(
                head.startswith(b"http/1.1 503 ") and b"\r\nretry-after: " in head for head in heads
            )
            assert resident_bytes(front_end) - before_bytes < 64 * MB

            for measurement in measurements():
                with measurement.within(PING_S):
                    assert server.ping() == 200
        finally:
            for connection in crowd:
                connection.close()

        wait_until(server.is_idle, "nothing of it is left")


def test_a_thousand_clients_that_leave_their_streams_are_counted_and_leave_no_memory(
    tmp_path: Path,
) -> None:
    with launch(
        write_model(tmp_path / "model", **{"option.echo_step_ms": 5, "frontend_workers": 1})
    ) as server:
        server.wait_ready()
        [front_end] = server.pids("lmi-front")

        def leave(number: int) -> None:
            streams = [server.connect(LONG | {"stream": True}) for _ in range(number)]
            for stream in streams:
                assert stream.recv(64).startswith(b"HTTP/1.1 200 ")
                stream.close()

        def left() -> float:
            return server.metrics().get('lmi_requests_total{code="499"}', 0.0)

        leave(50)
        wait_until(lambda: left() == 50, "the first ones are counted")
        before_bytes = resident_bytes(front_end)
        for _ in range(19):
            leave(50)

        wait_until(lambda: left() == 1000, "each is counted")
        wait_until(server.is_idle, "nothing of them is left")

        assert resident_bytes(front_end) - before_bytes < 10 * MB
        assert server.metrics()["lmi_engine_restarts_total"] == 0
