"""Load balancers learn the load of a server from the heads of its answers, in the words of ORCA."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from lmi.server.load_report import FORMAT, REPORT, as_text, load_of
from lmi.shared.state import Block
from tests.scripted import Host, host

NAMES = ["kv_cache_usage_perc", "num_requests_waiting", "num_requests_running"]


def head_of(running: Host, body: dict[str, Any], **headers: str) -> HTTPResponse:
    with closing(HTTPConnection("127.0.0.1", running.port, timeout=60)) as client:
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        response = client.getresponse()
        response.read()
        return response


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with host(tmp_path_factory.mktemp("host")) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "say hi"}, 200),
        ({"prompt": "say hi", "stream": True}, 200),
        ({"prompt": "say hi", "n": "x"}, 400),
    ],
    ids=["whole", "stream", "refused"],
)
def test_an_answer_has_the_load_where_its_request_asks_for_it(
    running: Host, body: dict[str, Any], status: int
) -> None:
    text = head_of(running, body, **{FORMAT: "TEXT"})
    assert text.status == status
    kind, _, metrics_text = str(text.getheader(REPORT)).partition(" ")
    names = [pair.partition("=")[0] for pair in metrics_text.split(", ")]
    assert kind == "TEXT" and names == [f"named_metrics.{name}" for name in NAMES]

    kind, _, metrics_text = str(
        head_of(running, body, **{FORMAT: "json"}).getheader(REPORT)
    ).partition(" ")
    assert kind == "JSON" and list(json.loads(metrics_text)["named_metrics"]) == NAMES


def test_who_does_not_ask_or_asks_for_another_format_gets_no_load(running: Host) -> None:
    for headers in ({}, {FORMAT: "BIN"}):
        response = head_of(running, {"prompt": "say hi"}, **headers)
        assert response.status == 200 and response.getheader(REPORT) is None


def test_the_report_counts_all_replicas_and_their_queues(tmp_path: Path) -> None:
    engines = Block.create(tmp_path / "model", 2, 1).engines
    engines[0].num_waiting = 3
    engines[1].num_waiting = 4
    engines[1].num_running = 2
    engines[0].num_used_blocks = 5
    engines[0].max_num_blocks = 10
    engines[1].max_num_blocks = 10

    assert as_text(load_of(engines)) == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, "
        "named_metrics.num_requests_waiting=7.0, named_metrics.num_requests_running=2.0"
    )
