"""Dashboards over a real Prometheus that scrapes a real server: every panel shows something after a
few requests.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from tests.served import Server, serve
from tests.system.container import Container, free_port, wait_until
from tests.system.vllm_boards import BOARDS, WITHOUT_MEANING

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "scripts" / "monitoring"
OURS = json.loads((MONITORING / "grafana.json").read_text())
MODEL = '{model_name="$model_name"}'
TIMES = {
    "E2E Request Latency": "vllm:e2e_request_latency_seconds",
    "Inter Token Latency": "vllm:inter_token_latency_seconds",
    "Time To First Token Latency": "vllm:time_to_first_token_seconds",
}
LENGTHS = {
    "Request Prompt Length": "vllm:request_prompt_tokens",
    "Request Generation Length": "vllm:request_generation_tokens",
}
RATES = {
    "Token Throughput": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "Queue Time": ("vllm:request_queue_time_seconds_sum",),
    "Requests Prefill and Decode Time": (
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_decode_time_seconds_sum",
    ),
    "Max Generation Token in Sequence Group": ("vllm:request_max_num_generation_tokens_sum",),
}
# The queries of vLLM's dashboard until 2025, examples/online_serving/prometheus_grafana, by its
# panels.
OF_VLLM = {
    "Scheduler State": [f"vllm:num_requests_running{MODEL}", f"vllm:num_requests_waiting{MODEL}"],
    "Cache Utilization": [f"vllm:kv_cache_usage_perc{MODEL}"],
    "Finish Reason": [
        f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[$__rate_interval]))"
    ],
    **{
        panel: [
            *(
                f"histogram_quantile({share}, sum by(le) "
                f"(rate({name}_bucket{MODEL}[$__rate_interval])))"
                for share in (0.99, 0.95, 0.9, 0.5)
            ),
            f"rate({name}_sum{MODEL}[$__rate_interval])\n/\nrate({name}_count{MODEL}[$__rate_interval])",
        ]
        for panel, name in TIMES.items()
    },
    **{
        panel: [f"sum by(le) (increase({name}_bucket{MODEL}[$__rate_interval]))"]
        for panel, name in LENGTHS.items()
    },
    **{
        panel: [f"rate({name}{MODEL}[$__rate_interval])" for name in names]
        for panel, names in RATES.items()
    },
}
OF_OURS = {
    panel["title"]: [target["expr"] for target in panel["targets"]] for panel in OURS["panels"]
}
QUERIES = [
    (panel, query)
    for panels in (OF_VLLM, BOARDS, OF_OURS)
    for panel, queries in panels.items()
    for query in queries
]


@dataclass
class Prometheus(Container):
    """The program as a server to ask; of a Container it uses the requests only."""

    def ask(self, path: str, **parameters: str) -> Any:
        answer = self.request("GET", f"/api/v1/{path}?{urlencode(parameters)}")
        assert answer.status == 200, answer.body
        return json.loads(answer.body)["data"]

    def values(self, query: str) -> list[float]:
        return [float(series["value"][1]) for series in self.ask("query", query=query)["result"]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(
        ROOT / "handlers" / "lmi_dist" / "demo",
        "option.model_name=demo",
        "frontend_workers=2",
        "option.speculative=ngram",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with our example of a configuration, but the port and a shorter interval."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")

    folder = tmp_path_factory.mktemp("prometheus")
    port = free_port()
    settings = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    [job] = settings["scrape_configs"]
    job |= {"scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    with running(folder, port):
        yield Prometheus(folder, folder / "log", port)


@contextmanager
def running(folder: Path, port: int) -> Iterator[None]:
    files = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        program = subprocess.Popen(
            ["prometheus", *files, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )

    try:
        wait_until(
            lambda: b"ready to receive" in (folder / "log").read_bytes(), "Prometheus listens"
        )
        yield
    finally:
        program.kill()
        program.wait()


@pytest.fixture(scope="module")
def model(server: Server, prometheus: Prometheus) -> str:
    """The name of a model that was asked between two scrapes."""
    wait_until(lambda: prometheus.values("vllm:num_requests_running"), "the server was scraped")
    for stream in (False, True):
        body = {"prompt": "A fox and a hen", "max_tokens": 8, "stream": stream}
        assert server.post(body, "/v1/completions").status == 200

    def shows(query: str) -> bool:
        """Ask once more, and return whether a scrape shows it. What one request shows may fall
        between two scrapes.
        """
        body = {
            "prompt": "A fox and a hen",
            "max_tokens": 400,
            "ignore_eos": True,
            "temperature": 0,
        }
        assert server.post(body, "/v1/completions").status == 200
        return bool(prometheus.values(query))

    for query in (
        "max_over_time(vllm:num_requests_running[5m]) > 0",
        "vllm:request_success_total > 1",
        "rate(vllm:spec_decode_num_accepted_tokens_total[10m]) > 0",
    ):
        wait_until(lambda query=query: shows(query), f"Prometheus sees {query}")

    [name] = prometheus.ask("label/model_name/values")
    return str(name)


@pytest.mark.parametrize(("panel", "query"), QUERIES)
def test_a_panel_of_a_dashboard_shows_something(
    panel: str, query: str, prometheus: Prometheus, model: str
) -> None:
    query = query.replace("$__rate_interval", "10m").replace("$__range", "10m")
    query = re.sub(r"\$model(_name)?", model, query)
    query = re.sub(r"\$(job|instance|engine)", ".*", query)
    if "_fds" in query and os.geteuid():
        pytest.skip("only root may count the files of all processes")

    assert any(map(math.isfinite, prometheus.values(query))), (panel, query)


@pytest.mark.parametrize("series", WITHOUT_MEANING)
def test_a_series_without_a_meaning_here_is_not_there(
    series: str, prometheus: Prometheus, model: str
) -> None:
    assert prometheus.values(series) == []


def test_our_dashboard_finds_the_models_to_choose_from(prometheus: Prometheus, model: str) -> None:
    [choice] = (variable for variable in OURS["templating"]["list"] if variable["name"] == "model")
    assert choice["query"]["query"] == "label_values(lmi_build_info, model)"
    assert prometheus.ask("label/model/values", **{"match[]": "lmi_build_info"}) == [model]
