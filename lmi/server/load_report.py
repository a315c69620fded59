"""The load of a model in the heads of its answers, in the words of ORCA, for load balancers that
ask for it.

The names and the form are those of vLLM. The figures are those of all replicas together, because a
balancer chooses among servers.
"""

import json
from collections.abc import Iterable, Sequence

from lmi.http.exchange import Exchange, Header
from lmi.server.service import Service
from lmi.shared.state import EngineRecord

FORMAT = "endpoint-load-metrics-format"  # of a request
REPORT = "endpoint-load-metrics"  # of its response


def report_load(exchange: Exchange, service: Service) -> None:
    """Let the head of the response have the load at that moment, if the request asks for it in a
    known format.
    """
    given = exchange.headers.get(FORMAT)
    if given is None:
        return

    if given.upper() not in WRITERS:
        line = f"{FORMAT} has no effect: allowed is {' or '.join(WRITERS)}"
        service.front_end.report_ignored([line], exchange.request_id)
        return

    write = WRITERS[given.upper()]

    def headers() -> Iterable[Header]:
        yield REPORT, write(load_of(service.block.engines))

    exchange.late_headers = headers


def load_of(engines: Sequence[EngineRecord]) -> dict[str, float]:
    return {
        "kv_cache_usage_perc": kv_cache_usage(engines),
        "num_requests_waiting": float(sum(engine.num_waiting for engine in engines)),
        "num_requests_running": float(sum(engine.num_running for engine in engines)),
    }


def kv_cache_usage(engines: Sequence[EngineRecord]) -> float:
    """Return the share of the KV caches that is in use, 0 to 1."""
    num_used_blocks = sum(engine.num_used_blocks for engine in engines)
    num_blocks = sum(engine.max_num_blocks for engine in engines)
    return num_used_blocks / num_blocks if num_blocks else 0.0


def as_text(metrics: dict[str, float]) -> str:
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())


def as_json(metrics: dict[str, float]) -> str:
    return "JSON " + json.dumps({"named_metrics": metrics})


WRITERS = {"TEXT": as_text, "JSON": as_json}
