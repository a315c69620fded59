"""The worker with an application that is not a front end: no runtime folder, no engine, no supervisor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmi.http.protocol import MAX_HEAD_BYTES
from lmi.http.worker import Beat
from lmi.runtime import ENVIRONMENT_NAME
from tests.scripted import wait_until

ROOT = Path(__file__).parents[2]
GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
TIMEOUT_S = 60.0


class Served:
    """The tiny application behind gunicorn."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
            fd = listener.fileno()
            command = [sys.executable, "-m", "gunicorn", "-k", "tests.http.tiny.HastyWorker", "-b", f"fd://{fd}"]
            environ = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_NAME}
            self.master = subprocess.Popen(
                [*command, "--log-level", "warning", "tests.http.tiny:app"], cwd=ROOT, env=environ, pass_fds=[fd]
            )

    def say(self, data: bytes) -> bytes:
        """Send `data` and return the whole answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S) as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(65536), b""))

    def is_open(self) -> bool:
        try:
            return bool(self.say(GET))
        except OSError:
            return False


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    try:
        yield served
    finally:
        served.master.kill()
        served.master.wait()


def test_any_application_is_served_under_the_limits_of_the_protocol(served: Served) -> None:
    assert served.say(GET).endswith(b"\r\n\r\nhello")
    assert served.say(GET.replace(b"Host: a", b"Host: a\r\nHost: b")).startswith(b"HTTP/1.1 400 ")
    long = GET.replace(b"Host: a", b"Host: a\r\nX: " + b"x" * MAX_HEAD_BYTES)
    assert served.say(long).startswith(b"HTTP/1.1 431 ")
    assert served.say(b"GET / HTTP/1.1\r\n").startswith(b"HTTP/1.1 408 ")


def test_a_worker_ends_when_its_master_is_gone(served: Served) -> None:
    assert served.say(GET).endswith(b"hello")
    served.master.kill()
    wait_until(lambda: not served.is_open(), TIMEOUT_S)


def test_a_worker_ends_in_order_with_its_master(served: Served) -> None:
    assert served.say(GET).endswith(b"hello")
    served.master.terminate()
    assert served.master.wait(TIMEOUT_S) == 0
    assert not served.is_open()


def test_a_worker_that_drains_asks_its_requests_to_end_and_cuts_those_that_go_on(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    assert served.say(GET).endswith(b"hello")
    place = ("127.0.0.1", served.port)
    with socket.create_connection(place) as patient, socket.create_connection(place) as endless:
        patient.sendall(GET.replace(b"/", b"/patient", 1))
        endless.sendall(GET.replace(b"/", b"/endless", 1))
        assert served.say(GET).endswith(b"hello"), "the requests before it have arrived"
        served.master.terminate()
        assert b"".join(iter(lambda: patient.recv(65536), b"")).endswith(b"hello")
        assert endless.recv(65536) == b""
    assert served.master.wait(TIMEOUT_S) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_master_that_was_paused_counts_only_the_time_in_which_it_ran() -> None:
    clock = iter([100.0, 101.0, 500.0, 512.0])
    settings = SimpleNamespace(umask=0, worker_tmp_dir=None, uid=os.geteuid(), gid=os.getegid())
    beat = Beat(settings, clock=lambda: next(clock))
    os.utime(beat.fileno(), (100.5, 100.5))
    assert [101.0 - beat.last_update(), 500.0 - beat.last_update()] == [0.5, 0.5]
    for second in range(501, 512):
        beat.pauses.note(float(second))
    assert 512.0 - beat.last_update() == 12.5
    beat.close()
