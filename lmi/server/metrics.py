"""The shared block as Prometheus text.

Any front end renders the text for all processes from shared memory, so a dead process's totals stay. Counters and
histograms are sums over the slots. Gauges are sums over the processes that live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lmi import __version__
from lmi.server.models import Models
from lmi.shared.state import CounterView, HistogramView

MEDIA_TYPE = CONTENT_TYPE_LATEST


class BlockCollector(Collector):
    """The metrics of one front end's models, and of all front ends."""

    def __init__(self, models: Models) -> None:
        self._models, self._block = models, models.front_end.block
        self._engines = [engine for service in models.services.values() for engine in service.block.engines]

    def collect(self) -> Iterator[Metric]:
        yield self._info()
        yield from self._requests()
        yield from self._of_engines()
        yield from self._latencies()

    def _info(self) -> Metric:
        family = InfoMetricFamily("lmi_build", "What runs here", labels=["model", "engine"])
        for name, service in self._models.services.items():
            family.add_metric([name, service.config.engine.handler], {"version": __version__})
        return family

    def _requests(self) -> Iterator[Metric]:
        frontends, supervisor = self._block.frontends, self._block.supervisor
        num_starts, num_first = sum(f.num_starts for f in frontends), self._models.front_end.config.frontend_workers
        yield labelled(
            "lmi_requests", "Requests ended, without pings and scrapes", "code", [f.num_requests for f in frontends]
        )
        yield labelled("lmi_finished", "Generations ended", "finish_reason", [f.num_finished for f in frontends])
        yield gauge(
            "lmi_requests_in_flight", "Requests between admission and end", sum(f.num_in_flight for f in frontends)
        )
        yield gauge(
            "lmi_sequences_in_flight", "Sequences that those requests ask for", sum(f.num_sequences for f in frontends)
        )
        yield gauge("lmi_request_body_bytes", "Request bodies held", sum(f.num_body_bytes for f in frontends))
        yield gauge("lmi_connections_open", "Connections of clients", sum(f.num_open_connections for f in frontends))
        yield counter("lmi_prompt_tokens", "Prompt tokens taken in", sum(f.num_prompt_tokens for f in frontends))
        yield counter("lmi_generated_tokens", "Tokens sent out", sum(f.num_generated_tokens for f in frontends))
        yield gauge(
            "lmi_event_loop_lag_seconds", "Worst lag of a front end's loop", max(f.loop_lag_s for f in frontends)
        )
        yield counter("lmi_engine_restarts", "Engine processes started again", supervisor.num_engine_restarts)
        yield counter("lmi_frontend_restarts", "Front ends started again", max(0, num_starts - num_first))
        blocks = (self._block, *self._models.front_end.model_blocks.values())
        num_dropped = sum(block.num_log_lines_dropped for block in blocks)
        yield counter("lmi_log_lines_dropped", "Lines that the log had no room for", num_dropped)

    def _of_engines(self) -> Iterator[Metric]:
        engines = self._engines
        used, whole = sum(e.num_used_blocks for e in engines), sum(e.max_num_blocks for e in engines)
        yield gauge("lmi_engines_ready", "Engines that can take requests", sum(e.is_alive for e in engines))
        yield gauge("lmi_requests_running", "Requests in the batch", sum(e.num_running for e in engines))
        yield gauge(
            "lmi_requests_waiting", "Requests waiting for a place in the batch", sum(e.num_waiting for e in engines)
        )
        yield gauge("lmi_kv_cache_usage_ratio", "Share of the KV cache in use", used / whole if whole else 0.0)
        yield counter("lmi_preemptions", "Sequences put back to make room", sum(e.num_preemptions for e in engines))
        yield counter("lmi_engine_steps", "Steps of the engines since they started", sum(e.step for e in engines))

    def _latencies(self) -> Iterator[Metric]:
        records = self._block.frontends
        yield histogram(
            "lmi_time_to_first_token_seconds",
            "From a streamed request's arrival to its first token",
            [r.time_to_first_token_s for r in records],
        )
        yield histogram(
            "lmi_inter_token_latency_seconds",
            "Between two tokens of one streamed request",
            [r.inter_token_latency_s for r in records],
        )
        yield histogram(
            "lmi_request_duration_seconds",
            "From the request's arrival to its end",
            [r.request_duration_s for r in records],
        )


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def labelled(name: str, text: str, label: str, views: Iterable[CounterView]) -> Metric:
    """Return the sum of the views, with one line for each label."""
    totals: Counter[str] = Counter()
    for view in views:
        totals.update(dict(view.items()))
    family = CounterMetricFamily(name, f"{text}, by {label}", labels=[label])
    for value, total in totals.items():
        family.add_metric([value], total)
    return family


def histogram(name: str, text: str, views: Iterable[HistogramView]) -> Metric:
    """Return the sum of the views, with the cumulative buckets of the text format."""
    views = list(views)
    buckets, total = [], 0
    for i, bound in enumerate([*views[0].bounds, "+Inf"]):
        total += sum(view.counts[i] for view in views)
        buckets.append((str(bound), float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=sum(view.sum for view in views))


def render(models: Models) -> bytes:
    """Return the whole text, for one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BlockCollector(models))
    return generate_latest(registry)
