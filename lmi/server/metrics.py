"""The shared blocks as Prometheus text.

Any front end renders the text for all processes from shared memory, so a dead process's totals stay. Counters and
histograms are sums over the slots. Gauges are sums over the processes that live. What belongs to a model has the label
`model`, and ends when the model is unloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lmi import __version__
from lmi.server.models import Models
from lmi.shared.state import CounterView, EngineRecord, FrontEndRecord, HistogramView

MEDIA_TYPE = CONTENT_TYPE_LATEST


class BlockCollector(Collector):
    """The metrics of one front end's models, and of all front ends."""

    def __init__(self, models: Models) -> None:
        self._models, self._block = models, models.front_end.block
        self._of_models = {name: service.block for name, service in models.services.items()}

    def collect(self) -> Iterator[Metric]:
        yield self._info()
        yield from self._requests()
        yield from self._answers()
        yield from self._engines()
        yield from self._latencies()

    def _info(self) -> Metric:
        family = InfoMetricFamily("lmi_build", "What runs here", labels=["model", "engine"])
        for name, service in self._models.services.items():
            family.add_metric([name, service.config.engine.handler], {"version": __version__})
        return family

    def _requests(self) -> Iterator[Metric]:
        """Yield what belongs to the whole server."""
        frontends = self._block.frontends
        num_starts, num_first = sum(f.num_starts for f in frontends), self._models.front_end.config.frontend_workers
        requests = CounterMetricFamily(
            "lmi_requests", "Requests ended, without pings and scrapes, by code", labels=["code"]
        )
        for code, total in totals(f.num_requests for f in frontends).items():
            requests.add_metric([code], total)
        yield requests
        yield gauge(
            "lmi_requests_in_flight", "Requests between admission and end", sum(f.num_in_flight for f in frontends)
        )
        yield gauge(
            "lmi_sequences_in_flight", "Sequences that those requests ask for", sum(f.num_sequences for f in frontends)
        )
        yield gauge("lmi_request_body_bytes", "Request bodies held", sum(f.num_body_bytes for f in frontends))
        yield gauge("lmi_connections_open", "Connections of clients", sum(f.num_open_connections for f in frontends))
        yield gauge(
            "lmi_event_loop_lag_seconds", "Worst lag of a front end's loop", max(f.loop_lag_s for f in frontends)
        )
        yield counter("lmi_frontend_restarts", "Front ends started again", max(0, num_starts - num_first))
        num_dropped = sum(block.num_log_lines_dropped for block in (self._block, *self._of_models.values()))
        yield counter("lmi_log_lines_dropped", "Lines that the log had no room for", num_dropped)

    def _answers(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "lmi_finished", "Generations ended, by finish_reason", labels=["model", "finish_reason"]
        )
        for model, block in self._of_models.items():
            for reason, total in totals(f.num_finished for f in block.frontends).items():
                finished.add_metric([model, reason], total)
        yield finished
        yield self._counter("lmi_prompt_tokens", "Prompt tokens taken in", lambda f: f.num_prompt_tokens)
        yield self._counter(
            "lmi_prompt_tokens_cached", "Prompt tokens that an engine had cached", lambda f: f.num_cached_tokens
        )
        yield self._counter("lmi_generated_tokens", "Tokens sent out", lambda f: f.num_generated_tokens)

    def _engines(self) -> Iterator[Metric]:
        yield self._gauge("lmi_engines_ready", "Engines that can take requests", lambda e: e.is_alive)
        yield self._gauge("lmi_requests_running", "Requests in the batch", lambda e: e.num_running)
        yield self._gauge("lmi_requests_waiting", "Requests waiting for a place in the batch", lambda e: e.num_waiting)
        usage = GaugeMetricFamily("lmi_kv_cache_usage_ratio", "Share of the KV cache in use", labels=["model"])
        preemptions = CounterMetricFamily("lmi_preemptions", "Sequences put back to make room", labels=["model"])
        steps = CounterMetricFamily("lmi_engine_steps", "Steps of the engines since they started", labels=["model"])
        restarts = CounterMetricFamily("lmi_engine_restarts", "Engine processes started again", labels=["model"])
        for model, block in self._of_models.items():
            used, whole = (sum(e.num_used_blocks for e in block.engines), sum(e.max_num_blocks for e in block.engines))
            usage.add_metric([model], used / whole if whole else 0.0)
            preemptions.add_metric([model], sum(e.num_preemptions for e in block.engines))
            steps.add_metric([model], sum(e.step for e in block.engines))
            restarts.add_metric([model], block.supervisor.num_engine_restarts)
        yield from (usage, preemptions, steps, restarts)

    def _latencies(self) -> Iterator[Metric]:
        yield self._histogram(
            "lmi_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            lambda f: f.time_to_first_token_s,
        )
        yield self._histogram(
            "lmi_inter_token_latency_seconds",
            "Between two tokens of one request, of a whole answer on average",
            lambda f: f.inter_token_latency_s,
        )
        duration = HistogramMetricFamily("lmi_request_duration_seconds", "From the request's arrival to its end")
        duration.add_metric([], *summed([f.request_duration_s for f in self._block.frontends]))
        yield duration

    def _gauge(self, name: str, text: str, value: Callable[[EngineRecord], int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model"])
        for model, block in self._of_models.items():
            family.add_metric([model], sum(map(value, block.engines)))
        return family

    def _counter(self, name: str, text: str, value: Callable[[FrontEndRecord], int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model"])
        for model, block in self._of_models.items():
            family.add_metric([model], sum(map(value, block.frontends)))
        return family

    def _histogram(self, name: str, text: str, view: Callable[[FrontEndRecord], HistogramView]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model"])
        for model, block in self._of_models.items():
            family.add_metric([model], *summed([view(record) for record in block.frontends]))
        return family


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def totals(views: Iterable[CounterView]) -> Counter[str]:
    """Return the sum of the views by label, with every label."""
    found: Counter[str] = Counter()
    for view in views:
        found.update(dict(view.items()))
    return found


def summed(views: Sequence[HistogramView]) -> tuple[list[tuple[str, float]], float]:
    """Return the sum of the views: the cumulative buckets of the text format, and the sum of the values."""
    buckets, total = [], 0
    for i, bound in enumerate([*views[0].bounds, "+Inf"]):
        total += sum(view.counts[i] for view in views)
        buckets.append((str(bound), float(total)))
    return buckets, sum(view.sum for view in views)


def render(models: Models) -> bytes:
    """Return the whole text, for one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BlockCollector(models))
    return generate_latest(registry)
