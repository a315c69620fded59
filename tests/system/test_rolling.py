"""Restarts that no client notices: behind balancers, and of one server in the place of another."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.served import Server, launch
from tests.system.container import wait_until, write_model
from tests.system.rolling import (
    KINDS,
    Load,
    Pings,
    balancer,
    command_of,
    restart,
    taking_over,
    two_servers,
)

HERE = [name for name in KINDS if command_of(name)]
# Two checks of a balancer
DELAY_S = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with launch(write_model(tmp_path / "old", **{"option.model_name": "old"})) as server:
        server.wait_ready()
        yield server


@pytest.mark.skipif(not HERE, reason="no nginx, haproxy or envoy on this machine")
def test_two_servers_are_restarted_one_after_the_other_and_no_balancer_loses_a_request(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(two_servers(tmp_path, DELAY_S))
        loads: dict[str, Load] = {}
        for name in HERE:
            port = stack.enter_context(
                balancer(name, tmp_path, [server.port for server in servers])
            )
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

        messages = [
            line["message"]
            for line in server.log_lines()
            if "new requests" in line.get("message", "")
        ]

        assert messages == [
            "SIGTERM: new requests are served for 60 s more, then open ones have 25 s",
            "SIGTERM: no new requests, open ones have 25 s",
        ]


def test_a_new_server_takes_the_port_over_and_no_client_and_no_ping_notices(
    server: Server, tmp_path: Path
) -> None:
    with Load(server.port, num_clients=6) as load, Pings(server.port) as pings:
        load.wait_for(6)
        with taking_over(
            server, tmp_path / "broken", **{"option.rolling_batch": "broken"}
        ) as broken:
            assert broken.wait() == 4

        wait_until(
            lambda: "has given up taking the port over" in server.log.read_text(),
            "the old one serves on",
        )
        load.wait_for(6)

        with taking_over(server, tmp_path / "new", **{"option.model_name": "new"}) as new:
            assert server.wait() == 0

            load.wait_for(12)
            assert b'"id":"new"' in new.request("GET", "/v1/models").body
            assert "took the port over" in new.log.read_text()
            assert load.failures == [] and pings.failures == []

            load.stop()


def test_when_the_old_server_dies_while_the_new_one_loads_that_one_answers_its_clients(
    server: Server, tmp_path: Path
) -> None:
    with taking_over(server, tmp_path / "new", **{"option.rolling_batch": "freezing"}) as new:
        wait_until(
            lambda: "loads beside this server" in server.log.read_text(), "it has the sockets"
        )
        server.signal(signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: new.ping() == 503, "it says that it loads")
        assert "this server listens in its place now" in new.log.read_text()
