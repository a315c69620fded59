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

# The header of a request that asks for the load, and that of the response which has it.
FORMAT = "endpoint-load-metrics-format"
REPORT = "endpoint-load-metrics"


def report_load(exchange: Exchange, service: Service) -> None:
    """Let the head of the response have the load at that moment, if the request asks for it in a
    known format.
    """
    format = exchange.headers.get(FORMAT)
    if format is None:
        return

    write = WRITERS.get(format.upper())
    if write is None:
        line = f"{FORMAT} has no effect: allowed is {' or '.join(WRITERS)}"
        service.front_end.report_ignored([line], exchange.request_id)
        return

    def headers() -> Iterable[Header]:
        yield REPORT, write(load_of(service.block.engines))

    exchange.late_headers = headers


def load_of(engines: Sequence[EngineRecord]) -> dict[str, float]:
    num_waiting = sum(engine.num_waiting for engine in engines)
    num_running = sum(engine.num_running for engine in engines)
    return {
        "kv_cache_usage_perc": kv_cache_usage(engines),
        "num_requests_waiting": float(num_waiting),
        "num_requests_running": float(num_running),
    }


def kv_cache_usage(engines: Sequence[EngineRecord]) -> float:
    """Return the share of the KV caches that is in use, 0 to 1."""
    num_used_blocks = sum(engine.num_used_blocks for engine in engines)
    num_blocks = sum(engine.max_num_blocks for engine in engines)
    return num_used_blocks / num_blocks if num_blocks else 0.0


def as_text(metrics: dict[str, float]) -> str:
    values = [f"named_metrics.{name}={value}" for name, value in metrics.items()]
    return "TEXT " + ", ".join(values)


def as_json(metrics: dict[str, float]) -> str:
    return "JSON " + json.dumps({"named_metrics": metrics})


WRITERS = {"TEXT": as_text, "JSON": as_json}
