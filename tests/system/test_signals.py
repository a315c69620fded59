"""Every signal to every process of a server: none but those that wish its end ends or stops one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.shared.signals import ENDING, FAULTS, UNSTOPPABLE
from tests.machine import wait_until
from tests.served import Server, launch
from tests.system.container import free_port, write_model

HARMLESS = sorted(signal.valid_signals() - {*ENDING, *FAULTS, *UNSTOPPABLE})
PROCESSES = ("lmi-supervisor", "lmi-gunicorn", "lmi-front-0", "lmi-engine", "lmi-gateway")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(
        tmp_path_factory.mktemp("signals") / "model", frontend_workers=1, with_gateway=free_port()
    )
    with launch(folder) as server:
        server.wait_200()
        wait_until(
            lambda: all(server.pids(process) for process in PROCESSES), "every process has its name"
        )
        yield server


@pytest.mark.parametrize("process", PROCESSES)
def test_no_signal_but_those_that_wish_it_ends_or_stops_a_process(
    server: Server, process: str
) -> None:
    before = {name: server.pids(name) for name in PROCESSES}
    [pid] = before[process]
    for signum in HARMLESS:
        os.kill(pid, signum)

    answer = server.generate(5, stream=False)
    assert answer.status == 200
    assert {name: server.pids(name) for name in PROCESSES} == before

    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state in "RSD", "it is stopped"
    assert server.metric("lmi_engine_restarts_total") == 0
