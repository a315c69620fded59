"""Restarts behind balancers that no client notices."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.served import launch
from tests.system.container import wait_until, write_model
from tests.system.rolling import KINDS, Load, balancer, command_of, restart, two_servers

HERE = [name for name in KINDS if command_of(name)]
DELAY_S = 2  # two checks of a balancer


@pytest.mark.skipif(not HERE, reason="no nginx, haproxy or envoy on this machine")
def test_two_servers_are_restarted_one_after_the_other_and_no_balancer_loses_a_request(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(two_servers(tmp_path, DELAY_S))
        loads: dict[str, Load] = {}
        for name in HERE:
            port = stack.enter_context(balancer(name, tmp_path, [server.port for server in servers]))
            loads[name] = stack.enter_context(Load(port, num_clients=6, name=name))
        for server in servers:
            restart(server, *loads.values())
    assert {name: load.failures for name, load in loads.items()} == dict.fromkeys(HERE, [])


def test_a_second_sigterm_ends_the_delay_in_which_requests_are_served(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", drain_delay=60, log_format="json")
    with launch(folder) as server:
        server.wait_ready()
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.ping() == 503, "balancers are told")
        for is_stream in (True, False):
            answer = server.generate(3, stream=is_stream)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert server.request("GET", "/v2/health/live").status == 200

        server.signal(signal.SIGTERM)
        assert server.wait_within(5.0) == 0
        said = [line["message"] for line in server.log_lines() if "new requests" in line.get("message", "")]
        assert said == [
            "SIGTERM: new requests are served for 60 s more, then open ones have 25 s",
            "SIGTERM: no new requests, open ones have 25 s",
        ]
